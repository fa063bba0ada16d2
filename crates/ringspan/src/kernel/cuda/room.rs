//! How much memory a GPU has, and how much of it this process has taken.

use super::Gpu;
use crate::error::Result;
use cudarc::driver::{CudaContext, DriverError, result, sys};
use std::sync::atomic::Ordering;

/// The memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// What any process may still take. What the driver holds in a pool for this process is not in it, used or not: once it was
    /// in use, it stays there until the process ends.
    pub free: u64,
    /// All of it.
    pub total: u64,
}

/// Lets the device's pool keep what is given back to it, for this process. A driver else gives it back to the device whenever
/// somebody waits for anything, and takes it again for the next layer.
pub(super) fn keep(context: &CudaContext) -> std::result::Result<(), DriverError> {
    let has_pools = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
    if context.attribute(has_pools)? == 0 {
        return Ok(());
    }
    context.bind_to_thread()?;
    let (threshold, mut all) = (sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX);
    // SAFETY: the context's own device; the attribute is a number of 64 bits.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())?;
        result::mem_pool::set_attribute(pool, threshold, (&raw mut all).cast())
    }
}

impl Gpu {
    /// What is free and what is there, of all processes.
    ///
    /// # Errors
    /// Failures of the driver.
    pub fn memory(&self) -> Result<GpuMemory> {
        let (free, total) = self.0.context.mem_get_info().map_err(self.failed("ask for its memory"))?;
        Ok(GpuMemory { free: free as u64, total: total as u64 })
    }

    /// Most bytes that this process had in use at once since the last call, or since it took the first: of the device's pool,
    /// from which this library and any other above cudarc takes its arrays. The driver's own memory (kernels, what cuBLAS
    /// and NCCL hold) is not counted, nor what the pool keeps for later.
    ///
    /// It is one count for the process: who calls this takes it from everybody else.
    ///
    /// # Errors
    /// Failures of the driver.
    pub fn most_used(&self) -> Result<u64> {
        let failed = self.failed("ask for the memory in use");
        self.0.context.bind_to_thread().map_err(&failed)?;
        // SAFETY: the context's own device.
        let pool = unsafe { result::device::get_default_mem_pool(self.0.context.cu_device()) }.map_err(&failed)?;
        let number = |attribute| -> std::result::Result<u64, DriverError> {
            let mut value = 0u64;
            // SAFETY: both attributes are numbers of 64 bits, and the pool is there as long as the device.
            unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut value).cast()) }?;
            Ok(value)
        };
        let most = number(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH).map_err(&failed)?;
        let now = number(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT).map_err(&failed)?;
        let (high, mut zero) = (sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0u64);
        // SAFETY: as above; 0 is the one value that this mark can be set to.
        unsafe { result::mem_pool::set_attribute(pool, high, (&raw mut zero).cast()) }.map_err(&failed)?;
        // The mark begins at 0, and says nothing of what was there then.
        Ok(most.max(self.0.in_use.swap(now, Ordering::Relaxed)))
    }

    /// The GPU's own number, by which processes know whether they share it.
    ///
    /// # Errors
    /// Failures of the driver.
    pub fn id(&self) -> Result<[u8; 16]> {
        let id = self.0.context.uuid().map_err(self.failed("ask for its number"))?;
        Ok(id.bytes.map(|byte| byte.to_ne_bytes()[0]))
    }
}
