//! Peak memory of a run, as the allocator and the GPUs' drivers count it.

use crate::error::Result;
use ringspan_candle::Devices;

/// The most bytes that were allocated at once, where the program's allocator counts them.
pub(crate) struct PeakAllocated {
    /// Returns the peak since its last call.
    take_peak: Option<fn() -> u64>,
    peak: u64,
}

impl PeakAllocated {
    /// Starts measuring.
    pub(crate) fn new(take_peak: Option<fn() -> u64>) -> Self {
        if let Some(peak) = take_peak {
            peak();
        }
        Self { take_peak, peak: 0 }
    }

    /// The peak since [`new`](Self::new).
    pub(crate) fn peak(&mut self) -> Option<u64> {
        self.peak = self.peak.max(self.take_peak?());
        Some(self.peak)
    }
}

/// The most bytes that this process had in use at once on a GPU.
pub(crate) struct PeakGpuMemory {
    devices: Devices,
    /// Peak of the fullest GPU, in bytes.
    peak: u64,
}

impl PeakGpuMemory {
    pub(crate) fn new(devices: &Devices) -> Self {
        Self { devices: devices.clone(), peak: 0 }
    }

    /// Starts measuring.
    pub(crate) fn begin(&mut self) -> Result<()> {
        self.devices.peak_used()?;
        self.peak = 0;
        Ok(())
    }

    /// The peak since [`begin`](Self::begin); none where the CPU computes.
    pub(crate) fn peak(&mut self) -> Result<Option<u64>> {
        let fullest_gpu = self.devices.peak_used()?.into_iter().max();
        self.peak = self.peak.max(fullest_gpu.unwrap_or(0));
        Ok(fullest_gpu.map(|_| self.peak))
    }
}
