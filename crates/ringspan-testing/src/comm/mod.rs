//! Communicators: the behaviour that every transport must have, and wrappers that change one aspect of it.

mod apart;
pub mod contract;
pub mod conversation;
mod hands_on;

pub use apart::apart;
