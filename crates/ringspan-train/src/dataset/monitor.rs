//! Progress of tokenization, and its end by the user.

use std::{
    ops::ControlFlow,
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// Receives a source that is being tokenized, the bytes of it that are read, and all of its bytes.
pub(crate) type ReportProgress<'a> = dyn FnMut(&Path, u64, u64) + Send + 'a;

/// Reports the progress of tokenization, and lets `stop` interrupt it.
pub(crate) struct TokenizationMonitor<'a> {
    report: Mutex<&'a mut ReportProgress<'a>>,
    stop: &'a AtomicBool,
}

impl<'a> TokenizationMonitor<'a> {
    /// `stop` may be set at any time.
    pub(crate) fn new(report: &'a mut ReportProgress<'a>, stop: &'a AtomicBool) -> Self {
        Self { report: Mutex::new(report), stop }
    }

    pub(super) fn report(&self, source: &Path, done: u64, bytes: u64) -> ControlFlow<()> {
        if self.stop.load(Ordering::SeqCst) {
            return ControlFlow::Break(());
        }
        self.report.lock().unwrap_or_else(PoisonError::into_inner)(source, done, bytes);
        ControlFlow::Continue(())
    }
}
