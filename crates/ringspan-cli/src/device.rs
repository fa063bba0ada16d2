//! The devices of `attend`: threads of the CPU, or GPUs. Commands that run models open their devices by `ringspan_candle`.

use anyhow::{Result, ensure};
use ringspan::Kernel;
use ringspan::comm::ranks::Ranks;
use ringspan::kernel::Isa;
use ringspan_candle::DeviceName;

/// The devices of the ranks of this process.
pub(crate) enum Devices {
    /// The processor of this machine.
    Cpu {
        /// Number of threads of each rank.
        threads: usize,
        /// Instruction set that the kernels use.
        isa: Isa,
    },
    /// GPUs, which ranks take in turn.
    #[cfg(feature = "cuda")]
    Gpus(Vec<ringspan_cuda::Gpu>),
}

impl Devices {
    /// Opens the requested devices. `threads` is the number of threads of a rank, `given` whether the user set it; `isa` is the
    /// requested instruction set, or `None` for the best.
    ///
    /// # Errors
    /// An instruction set that this processor lacks, or that is requested on a GPU; GPUs that do not exist.
    pub(crate) fn open(name: DeviceName, place: &Ranks, threads: usize, given: bool, isa: Option<Isa>) -> Result<Self> {
        match name {
            DeviceName::Cpu => {
                let isa = isa.unwrap_or_else(Isa::best);
                // Every rank makes its own kernel; this one only refuses a missing instruction set before any of them starts.
                Kernel::with_isa(threads, isa)?;
                Ok(Self::Cpu { threads, isa })
            }
            DeviceName::Cuda(number) => {
                ensure!(isa.is_none(), "--isa names instructions of the CPU, and --device cuda computes on a GPU");
                open_gpus(number, place, given)
            }
        }
    }

    /// The kernel with which rank `rank` computes.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub(crate) fn kernel(&self, rank: usize) -> Result<Kernel> {
        match self {
            Self::Cpu { threads, isa } => Ok(Kernel::with_isa(*threads, *isa)?),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => Ok(gpus[rank % gpus.len()].kernel()?),
        }
    }

    /// Connects ranks that are processes and compute on GPUs by NCCL, if all of them can; returns the ranks, and a description
    /// of how blocks travel where there is a choice. All ranks must call this.
    pub(crate) fn connect(&self, place: &Ranks) -> Result<(Ranks, Option<String>)> {
        match self {
            Self::Cpu { .. } => Ok((place.clone(), None)),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => Ok(gpus[0].connect(place, crate::mesh::DEADLINE)?),
        }
    }

    /// The GPUs by number and name; empty where CPU threads compute.
    pub(crate) fn names(&self) -> Vec<String> {
        match self {
            Self::Cpu { .. } => Vec::new(),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => gpus.iter().map(|gpu| format!("{gpu:?}")).collect(),
        }
    }

    /// Number of threads of a rank; `None` on GPUs.
    pub(crate) fn threads(&self) -> Option<usize> {
        match self {
            Self::Cpu { threads, .. } => Some(*threads),
            #[cfg(feature = "cuda")]
            Self::Gpus(_) => None,
        }
    }

    /// Instruction set that the kernels use; `None` on GPUs.
    pub(crate) fn isa(&self) -> Option<Isa> {
        match self {
            Self::Cpu { isa, .. } => Some(*isa),
            #[cfg(feature = "cuda")]
            Self::Gpus(_) => None,
        }
    }
}

impl std::fmt::Display for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu { threads, isa } => write!(f, "{threads} threads a rank, {isa}"),
            #[cfg(feature = "cuda")]
            Self::Gpus(_) => write!(f, "{}", self.names().join(", ")),
        }
    }
}

#[cfg(feature = "cuda")]
fn open_gpus(number: Option<usize>, place: &Ranks, gives_threads: bool) -> Result<Devices> {
    use ringspan_cuda::Gpu;
    anyhow::ensure!(!gives_threads, "--threads are those of the CPU, and --device cuda computes on a GPU");
    // If there is no GPU, opening the first one says what is missing.
    let count = Gpu::count()?.max(1);
    let numbers = match (number, place.local_rank()) {
        (Some(number), _) => number..number + 1,
        // A process opens only its own GPU: every process that opens a GPU takes some of its memory.
        (None, Some(rank)) => rank % count..rank % count + 1,
        (None, None) => 0..count,
    };
    let gpus = numbers.map(Gpu::open).collect::<ringspan::error::Result<Vec<_>>>()?;
    Ok(Devices::Gpus(gpus))
}

#[cfg(not(feature = "cuda"))]
fn open_gpus(_: Option<usize>, _: &Ranks, _: bool) -> Result<Devices> {
    anyhow::bail!(
        "--device cuda: this program was built without GPUs; build it with `cargo build --release --features cuda`"
    )
}
