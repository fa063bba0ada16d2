//! The memory of a GPU, and how much of it this process uses.

use crate::gpu::Gpu;
use cudarc::driver::{DriverError, result, sys};
use ringspan::Result;
use std::sync::atomic::Ordering;

/// The memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// Bytes that any process can still allocate. The driver's pool of this process is not included, whether it is in use
    /// or not: memory that was used once stays in the pool until the process ends.
    pub free: u64,
    /// All bytes of the GPU.
    pub total: u64,
}

impl Gpu {
    /// Free and total memory of the GPU, counting all processes.
    ///
    /// # Errors
    /// Failures of the driver.
    pub fn memory(&self) -> Result<GpuMemory> {
        let (free, total) = self.0.context.mem_get_info().map_err(self.failed("ask for its memory"))?;
        Ok(GpuMemory { free: free as u64, total: total as u64 })
    }

    /// Peak number of bytes that this process had in use since the last call, or since its first allocation. It counts the
    /// device's pool, from which this library and others that use cudarc allocate arrays. It does not count the driver's
    /// own memory (kernels, what cuBLAS and NCCL hold), nor free memory in the pool.
    ///
    /// There is one peak for the whole process: each call resets it for all callers.
    ///
    /// # Errors
    /// Failures of the driver.
    pub fn peak_used(&self) -> Result<u64> {
        let failed = self.failed("ask for the memory in use");
        self.0.context.bind_to_thread().map_err(&failed)?;
        // SAFETY: the device is that of the context.
        let pool = unsafe { result::device::get_default_mem_pool(self.0.context.cu_device()) }.map_err(&failed)?;
        let number = |attribute| -> std::result::Result<u64, DriverError> {
            let mut value = 0u64;
            // SAFETY: both attributes are 64-bit numbers, and the pool exists as long as the device.
            unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut value).cast()) }?;
            Ok(value)
        };
        let most = number(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH).map_err(&failed)?;
        let now = number(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT).map_err(&failed)?;
        let (high, mut zero) = (sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0u64);
        // SAFETY: as above; 0 is the only value that this mark can be set to.
        unsafe { result::mem_pool::set_attribute(pool, high, (&raw mut zero).cast()) }.map_err(&failed)?;
        // The mark restarts at 0 and does not include the memory in use then.
        Ok(most.max(self.0.in_use.swap(now, Ordering::Relaxed)))
    }

    /// The unique id of the GPU, which tells whether processes share it.
    ///
    /// # Errors
    /// Failures of the driver.
    pub fn id(&self) -> Result<[u8; 16]> {
        let id = self.0.context.uuid().map_err(self.failed("ask for its number"))?;
        Ok(id.bytes.map(|byte| byte.to_ne_bytes()[0]))
    }
}
