//! The GPUs on which ranks of this process compute.

use anyhow::{Result, ensure};
use ringspan::Kernel;
use ringspan::comm::process_group::ProcessGroup;
use ringspan_cuda::Gpu;

/// GPUs, which ranks take in turn; there is at least one.
pub(crate) struct Gpus(Vec<Gpu>);

impl Gpus {
    /// Opens the GPU of this number, or with `None` all that ranks of this process use. `gives_threads` says whether the user set a
    /// number of threads.
    ///
    /// # Errors
    /// GPUs that do not exist, and a number of threads.
    pub(crate) fn open(number: Option<usize>, processes: &ProcessGroup, gives_threads: bool) -> Result<Self> {
        ensure!(!gives_threads, "--threads are those of the CPU, and --device cuda computes on a GPU");
        // If there is no GPU, opening the first one says what is missing.
        let count = Gpu::count()?.max(1);
        let numbers = match (number, processes.local_rank()) {
            (Some(number), _) => number..number + 1,
            // A process opens only its own GPU: every process that opens a GPU takes some of its memory.
            (None, Some(rank)) => rank % count..rank % count + 1,
            (None, None) => 0..count,
        };
        Ok(Self(numbers.map(Gpu::open).collect::<ringspan::Result<_>>()?))
    }

    /// The kernel with which rank `rank` computes.
    pub(crate) fn kernel(&self, rank: usize) -> Result<Kernel> {
        Ok(self.0[rank % self.0.len()].kernel()?)
    }

    /// Connects ranks that are processes by NCCL, if all of them can, and says how blocks travel.
    pub(crate) fn connect(&self, processes: &ProcessGroup) -> Result<(ProcessGroup, Option<String>)> {
        Ok(self.0[0].connect(processes, crate::mesh::DEADLINE)?)
    }

    /// The GPUs by number and name.
    pub(crate) fn names(&self) -> Vec<String> {
        self.0.iter().map(|gpu| format!("{gpu:?}")).collect()
    }
}
