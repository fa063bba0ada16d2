//! The memory that a rank holds while it computes attention.

/// Counts the bytes of tensors, blocks and packing buffers that a rank holds at once.
#[derive(Debug, Default)]
pub(super) struct Meter {
    now: u64,
    peak: u64,
}

impl Meter {
    pub(super) fn hold(&mut self, bytes: u64) {
        self.now += bytes;
        self.peak = self.peak.max(self.now);
    }

    pub(super) fn release(&mut self, bytes: u64) {
        self.now = self.now.saturating_sub(bytes);
    }

    /// Counts memory that is allocated and freed inside one call.
    pub(super) fn touch(&mut self, bytes: u64) {
        self.hold(bytes);
        self.release(bytes);
    }

    pub(super) fn peak(&self) -> u64 {
        self.peak
    }
}
