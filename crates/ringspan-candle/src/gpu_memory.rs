//! How much memory GPUs have, how much of it is in use, and which ranks share it.

use crate::device::{Devices, RankDevice};
use crate::nvidia::{self, Gpu};
use ringspan::comm::Buffer;
use ringspan::comm::process_group::ProcessGroup;
use ringspan::error::Result;

/// The memory of a GPU on which ranks of this process compute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuMemoryUse {
    /// The GPU's number and model name.
    pub name: String,
    /// Bytes of free memory.
    pub free: u64,
    /// Bytes of memory in all.
    pub total: u64,
    /// Number of ranks that share the GPU, including those of other processes.
    pub ranks: usize,
}

impl RankDevice {
    /// An identifier that is equal for ranks that share a GPU; `None` on the CPU.
    ///
    /// # Errors
    /// Failures of the driver.
    pub fn id(&self) -> Result<Option<[u8; 16]>> {
        if let Some(gpu) = &self.gpu {
            return gpu.id().map(Some);
        }
        Ok(None)
    }
}

impl Devices {
    /// The GPUs on which ranks of this process compute, empty on the CPU; `size` is the number of ranks in all. Where ranks
    /// are processes, all of them must call this.
    ///
    /// # Errors
    /// Failures of the driver and of other ranks.
    pub fn gpu_memory_use(&self, processes: &ProcessGroup, size: usize) -> Result<Vec<GpuMemoryUse>> {
        let Some(comm) = processes.comm() else {
            let of = |index: usize| (index..size).step_by(self.count()).count();
            return self.gpus().enumerate().map(|(index, device)| memory_use(device, of(index))).collect();
        };
        let id = self.of(comm.rank()).id()?.map_or_else(Vec::new, |id| id.to_vec());
        let all = comm.all_gather(Buffer::U8(id.clone()))?;
        let sharing = all.iter().filter(|other| ***other == Buffer::U8(id.clone())).count();
        // The gathering above makes sure that all processes have opened their GPUs, which takes memory, too.
        self.gpus().map(|device| memory_use(device, sharing)).collect()
    }

    /// The largest number of bytes that this process had in use at once on each GPU since the last call. See
    /// `ringspan_cuda::Gpu::peak_used`.
    ///
    /// # Errors
    /// Failures of the driver.
    pub fn peak_used(&self) -> Result<Vec<u64>> {
        self.gpus().map(peak_used).collect()
    }

    fn gpus(&self) -> impl Iterator<Item = &RankDevice> {
        self.iter().filter(|device| !device.tensors().is_cpu())
    }
}

fn memory_use(device: &RankDevice, ranks: usize) -> Result<GpuMemoryUse> {
    let Some(gpu) = &device.gpu else { return Ok(GpuMemoryUse { name: "a CPU".into(), free: 0, total: 0, ranks }) };
    let [free, total] = nvidia::memory(gpu)?;
    Ok(GpuMemoryUse { name: format!("{gpu:?}"), free, total, ranks })
}

fn peak_used(device: &RankDevice) -> Result<u64> {
    device.gpu.as_ref().map_or(Ok(0), Gpu::peak_used)
}
