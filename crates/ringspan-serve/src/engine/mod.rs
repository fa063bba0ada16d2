//! The inference engine: many requests at a time over one mesh of ranks.

pub mod request;
pub mod step;
