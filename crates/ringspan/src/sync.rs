//! Locks and threads of the code whose interleavings are checked.
//!
//! That code names them as `crate::sync`. The model check (`tests/comm_model`) compiles the same files in a crate
//! whose `sync` hands every step to a scheduler, so neither a feature nor a dependency of the library is needed for it.

pub(crate) use std::sync::atomic::AtomicU64;
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread;
