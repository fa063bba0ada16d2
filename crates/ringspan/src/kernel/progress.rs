//! The progress function that a kernel calls while it computes, to advance communication that only moves when it is called.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A function that a kernel calls between parts of its work.
pub type Progress = Arc<dyn Fn() + Send + Sync>;

/// A rank's progress function, if it has one, with the time of its next call: tasks may take only a microsecond, which is
/// more often than transfers need.
pub(super) struct ProgressHook {
    pub(super) progress: Option<Progress>,
    /// Least time between two calls in a computation.
    pub(super) pause: Duration,
    created: Instant,
    /// Nanoseconds after `created` before which the function is not called again.
    next: AtomicU64,
}

impl Default for ProgressHook {
    /// No function, and a pause with which a call of a microsecond costs 0.4%.
    fn default() -> Self {
        Self { progress: None, pause: Duration::from_micros(250), created: Instant::now(), next: AtomicU64::new(0) }
    }
}

impl ProgressHook {
    /// Makes the next [`call`](Self::call) happen at once, so that even a short computation advances communication.
    pub(super) fn begin(&self) {
        self.next.store(0, Ordering::Relaxed);
    }

    /// Calls the function if the pause is over; the caller's thread does this between tasks.
    pub(super) fn call(&self) {
        let Some(progress) = &self.progress else { return };
        if self.created.elapsed() >= Duration::from_nanos(self.next.load(Ordering::Relaxed)) {
            progress();
            let soonest = self.created.elapsed().saturating_add(self.pause).as_nanos();
            self.next.store(u64::try_from(soonest).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }
}
