//! Locks and threads for the code whose interleavings are model-checked.
//!
//! `comm` imports them as `crate::sync`. The model check (`tests/comm_model`) compiles the same files in a crate whose
//! `sync` passes every operation to a scheduler, so the library needs neither a feature nor a dependency for it.

pub(crate) use std::sync::atomic::AtomicU64;
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread;

/// How long a thread spins for what is likely to come soon, before it sleeps: waking takes longer than most waits of ranks that compute the
/// same layer, also where a virtual machine's neighbours slow down one of them for a moment.
const SPIN_TIME: std::time::Duration = std::time::Duration::from_micros(500);

/// Threads that compute at the same time; more than that should not spin.
pub(crate) fn processors() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Spins until `is_so` returns true; returns false if it has not within [`SPIN_TIME`] after `begin`. Each turn yields, so that threads that
/// wait for a processor can run.
pub(crate) fn spin_until(begin: std::time::Instant, is_so: impl Fn() -> bool) -> bool {
    while !is_so() {
        if begin.elapsed() >= SPIN_TIME {
            return false;
        }
        thread::yield_now();
    }
    true
}
