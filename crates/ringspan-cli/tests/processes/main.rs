//! Commands whose ranks are processes, and commands that were started as one of several by mistake.

mod launch;
mod memory;
mod mpi;
mod serve;
#[path = "../support/mod.rs"]
mod support;
mod video;
