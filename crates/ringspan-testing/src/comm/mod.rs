//! Communicators: the behaviour that every transport must have, and wrappers that change one aspect of it.

mod as_processes;
pub mod contract;
pub mod conversation;
mod delegate;

pub use as_processes::as_processes;
