//! Locks and threads for the code whose interleavings are model-checked.
//!
//! `comm` imports them as `crate::sync`. The model check (`tests/comm_model`) compiles the same files in a crate whose
//! `sync` passes every operation to a scheduler, so the library needs neither a feature nor a dependency for it.

pub(crate) use std::sync::atomic::AtomicU64;
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread;

/// How long a thread spins for what is likely to come soon, before it sleeps: waking takes longer than most waits of ranks that compute
/// the same layer.
const SPIN_TIME: std::time::Duration = std::time::Duration::from_micros(100);

/// Waits a moment until `is_so` returns true. Other threads that have no processor get this one's.
pub(crate) fn spin_until(is_so: impl Fn() -> bool) {
    let begin = std::time::Instant::now();
    while !is_so() && begin.elapsed() < SPIN_TIME {
        thread::yield_now();
    }
}
