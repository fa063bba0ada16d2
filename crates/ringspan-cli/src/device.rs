//! The devices of `attend`: threads of the CPU, or GPUs. Commands that run models open their devices by `ringspan_candle`.

#[cfg_attr(not(feature = "cuda"), path = "device/without_gpus.rs")]
mod gpus;

use anyhow::{Result, ensure};
use gpus::Gpus;
use ringspan::Kernel;
use ringspan::comm::process_group::ProcessGroup;
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
    Gpus(Gpus),
}

impl Devices {
    /// Opens the requested devices. `threads` is the number of threads of a rank, `given` whether the user set it; `isa` is the
    /// requested instruction set, or `None` for the best.
    ///
    /// # Errors
    /// An instruction set that this processor lacks, or that is requested on a GPU; GPUs that do not exist.
    pub(crate) fn open(
        name: DeviceName,
        processes: &ProcessGroup,
        threads: usize,
        given: bool,
        isa: Option<Isa>,
    ) -> Result<Self> {
        match name {
            DeviceName::Cpu => {
                let isa = isa.unwrap_or_else(Isa::best);
                // Every rank makes its own kernel; this one only refuses a missing instruction set before any of them starts.
                Kernel::with_isa(threads, isa)?;
                Ok(Self::Cpu { threads, isa })
            }
            DeviceName::Cuda(number) => {
                ensure!(isa.is_none(), "--isa names instructions of the CPU, and --device cuda computes on a GPU");
                Ok(Self::Gpus(Gpus::open(number, processes, given)?))
            }
        }
    }

    /// The kernel with which rank `rank` computes.
    pub(crate) fn kernel(&self, rank: usize) -> Result<Kernel> {
        match self {
            Self::Cpu { threads, isa } => Ok(Kernel::with_isa(*threads, *isa)?),
            Self::Gpus(gpus) => gpus.kernel(rank),
        }
    }

    /// Connects ranks that are processes and compute on GPUs by NCCL, if all of them can; returns the ranks, and a description
    /// of how blocks travel where there is a choice. All ranks must call this.
    pub(crate) fn connect(&self, processes: &ProcessGroup) -> Result<(ProcessGroup, Option<String>)> {
        match self {
            Self::Cpu { .. } => Ok((processes.clone(), None)),
            Self::Gpus(gpus) => gpus.connect(processes),
        }
    }

    /// The GPUs by number and name; empty where CPU threads compute.
    pub(crate) fn names(&self) -> Vec<String> {
        match self {
            Self::Cpu { .. } => Vec::new(),
            Self::Gpus(gpus) => gpus.names(),
        }
    }

    /// Number of threads of a rank; `None` on GPUs.
    pub(crate) fn threads(&self) -> Option<usize> {
        match self {
            Self::Cpu { threads, .. } => Some(*threads),
            Self::Gpus(_) => None,
        }
    }

    /// Instruction set that the kernels use; `None` on GPUs.
    pub(crate) fn isa(&self) -> Option<Isa> {
        match self {
            Self::Cpu { isa, .. } => Some(*isa),
            Self::Gpus(_) => None,
        }
    }
}

impl std::fmt::Display for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu { threads, isa } => write!(f, "{threads} threads a rank, {isa}"),
            Self::Gpus(_) => write!(f, "{}", self.names().join(", ")),
        }
    }
}
