//! Locks and threads for the code whose interleavings are model-checked.
//!
//! `comm` imports them as `crate::sync`. The model check (`tests/comm_model`) compiles the same files in a crate whose
//! `sync` passes every operation to a scheduler, so the library needs neither a feature nor a dependency for it.

pub(crate) use std::sync::atomic::AtomicU64;
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread;
