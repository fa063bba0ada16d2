//! What the ranks of `attend` compute with: threads of the CPU, or GPUs. Those of models are opened by the tensors' crate.

use anyhow::{Result, ensure};
use ringspan::Kernel;
use ringspan::comm::ranks::Ranks;
use ringspan::kernel::Isa;
use ringspan_candle::DeviceName;

/// The devices of the ranks of this process.
pub(crate) enum Devices {
    /// The processor of this machine.
    Cpu {
        /// Threads of each rank.
        threads: usize,
        /// Instructions that the kernels use.
        isa: Isa,
    },
    /// Ranks take them in turn.
    #[cfg(feature = "cuda")]
    Gpus(Vec<ringspan::kernel::Gpu>),
}

impl Devices {
    /// Opens what is asked for. `threads` are those of a rank, `given` whether somebody asked for their number; `isa` are the
    /// instructions that were asked for, or the best ones.
    ///
    /// # Errors
    /// Instructions that this processor lacks, or that are asked for on a GPU; GPUs that are not there.
    pub(crate) fn open(name: DeviceName, place: &Ranks, threads: usize, given: bool, isa: Option<Isa>) -> Result<Self> {
        match name {
            DeviceName::Cpu => {
                let isa = isa.unwrap_or_else(Isa::best);
                // Every rank makes its own kernel; what the processor lacks is said before any of them starts.
                Kernel::with_isa(threads, isa)?;
                Ok(Self::Cpu { threads, isa })
            }
            DeviceName::Cuda(number) => {
                ensure!(isa.is_none(), "--isa names instructions of the CPU, and --device cuda computes on a GPU");
                open_gpus(number, place, given)
            }
        }
    }

    /// What rank `rank` computes with.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub(crate) fn kernel(&self, rank: usize) -> Result<Kernel> {
        match self {
            Self::Cpu { threads, isa } => Ok(Kernel::with_isa(*threads, *isa)?),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => Ok(Kernel::cuda(&gpus[rank % gpus.len()])?),
        }
    }

    /// The same ranks, and how their blocks go to others, where there is more than one way: ranks that are processes and
    /// compute on GPUs take NCCL if they all can. All of them must call this.
    pub(crate) fn connect(&self, place: &Ranks) -> Result<(Ranks, Option<String>)> {
        match self {
            Self::Cpu { .. } => Ok((place.clone(), None)),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => Ok(gpus[0].connect(place, crate::mesh::DEADLINE)?),
        }
    }

    /// The GPUs, by number and name; none where threads compute.
    pub(crate) fn names(&self) -> Vec<String> {
        match self {
            Self::Cpu { .. } => Vec::new(),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => gpus.iter().map(|gpu| format!("{gpu:?}")).collect(),
        }
    }

    /// Threads of a rank, where they compute.
    pub(crate) fn threads(&self) -> Option<usize> {
        match self {
            Self::Cpu { threads, .. } => Some(*threads),
            #[cfg(feature = "cuda")]
            Self::Gpus(_) => None,
        }
    }

    /// Instructions that the kernels use, where threads compute.
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
    use ringspan::kernel::Gpu;
    anyhow::ensure!(!gives_threads, "--threads are those of the CPU, and --device cuda computes on a GPU");
    // Without any, opening the first one says what is missing.
    let count = Gpu::count()?.max(1);
    let numbers = match (number, place.local_rank()) {
        (Some(number), _) => number..number + 1,
        // A process opens its own: memory of a GPU goes to every process that has it open.
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
