//! Peak memory of a run, as the allocator and the GPUs' drivers count it.

use crate::error::Result;
use ringspan_candle::Devices;

/// The most bytes that were allocated at once, where the program's allocator counts them.
pub(crate) struct Allocated {
    /// Returns the peak since its last call.
    since_last: Option<fn() -> u64>,
    most: u64,
}

impl Allocated {
    /// Starts measuring.
    pub(crate) fn new(since_last: Option<fn() -> u64>) -> Self {
        if let Some(most) = since_last {
            most();
        }
        Self { since_last, most: 0 }
    }

    /// The peak since [`new`](Self::new).
    pub(crate) fn most(&mut self) -> Option<u64> {
        self.most = self.most.max(self.since_last?());
        Some(self.most)
    }
}

/// The most bytes that this process had in use at once on a GPU.
pub(crate) struct InUse {
    devices: Devices,
    /// Peak of the fullest GPU, in bytes.
    most: u64,
}

impl InUse {
    pub(crate) fn new(devices: &Devices) -> Self {
        Self { devices: devices.clone(), most: 0 }
    }

    /// Starts measuring.
    pub(crate) fn begin(&mut self) -> Result<()> {
        self.devices.most_used()?;
        self.most = 0;
        Ok(())
    }

    /// The peak since [`begin`](Self::begin); none where the CPU computes.
    pub(crate) fn most(&mut self) -> Result<Option<u64>> {
        let fullest = self.devices.most_used()?.into_iter().max();
        self.most = self.most.max(fullest.unwrap_or(0));
        Ok(fullest.map(|_| self.most))
    }
}
