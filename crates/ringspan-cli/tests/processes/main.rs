//! Commands whose ranks are processes, and commands that were started as one of several by mistake.

#[cfg(feature = "mpi")]
#[path = "../../../ringspan-train/tests/memory/four_bits.rs"]
mod four_bits;
mod launch;
mod memory;
mod mpi;
mod serve;
#[path = "../support/mod.rs"]
mod support;
mod video;
