//! What a kernel calls while it computes: communication that moves only when it is asked to is driven so.

use super::super::Progress;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A rank's hook, if it has one. Pieces of work may be as short as a microsecond, a transfer needs no such haste.
pub(in crate::kernel) struct Hook {
    pub(in crate::kernel) progress: Option<Progress>,
    /// From one call to the next within a computation, at least.
    pub(in crate::kernel) pause: Duration,
    created: Instant,
    /// Nanoseconds behind `created` before which it is not called again.
    next: AtomicU64,
}

impl Default for Hook {
    /// None, and a pause by which a call that takes a microsecond costs 0.4%.
    fn default() -> Self {
        Self { progress: None, pause: Duration::from_micros(250), created: Instant::now(), next: AtomicU64::new(0) }
    }
}

impl Hook {
    /// At the begin of a computation: even a short one drives communication on.
    pub(super) fn begin(&self) {
        self.next.store(0, Ordering::Relaxed);
    }

    /// Between pieces of work of the caller's thread.
    pub(super) fn call(&self) {
        let Some(progress) = &self.progress else { return };
        if self.created.elapsed() >= Duration::from_nanos(self.next.load(Ordering::Relaxed)) {
            progress();
            let soonest = self.created.elapsed().saturating_add(self.pause).as_nanos();
            self.next.store(u64::try_from(soonest).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }
}
