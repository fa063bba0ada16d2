//! Memory that a run takes, by its allocator and by GPUs' drivers.

use crate::error::Result;
use ringspan_candle::Devices;

/// Most bytes that were allocated at once, where the program counts them.
pub(crate) struct Allocated {
    /// Of the time since it was called last.
    since_last: Option<fn() -> u64>,
    most: u64,
}

impl Allocated {
    /// From now on.
    pub(crate) fn new(since_last: Option<fn() -> u64>) -> Self {
        if let Some(most) = since_last {
            most();
        }
        Self { since_last, most: 0 }
    }

    /// Up to now.
    pub(crate) fn most(&mut self) -> Option<u64> {
        self.most = self.most.max(self.since_last?());
        Some(self.most)
    }
}

/// Most bytes that this process had in use at once on a GPU.
pub(crate) struct InUse {
    devices: Devices,
    /// Of the fullest one.
    most: u64,
}

impl InUse {
    pub(crate) fn new(devices: &Devices) -> Self {
        Self { devices: devices.clone(), most: 0 }
    }

    /// From now on.
    pub(crate) fn begin(&mut self) -> Result<()> {
        self.devices.most_used()?;
        self.most = 0;
        Ok(())
    }

    /// Up to now; none where the CPU computes.
    pub(crate) fn most(&mut self) -> Result<Option<u64>> {
        let fullest = self.devices.most_used()?.into_iter().max();
        self.most = self.most.max(fullest.unwrap_or(0));
        Ok(fullest.map(|_| self.most))
    }
}
