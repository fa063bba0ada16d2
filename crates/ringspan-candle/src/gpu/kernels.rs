//! Kernels of fused layers: compiled when they are first asked for, once for each GPU, and started on candle's stream.

use crate::activation::Activation;
use candle_core::cuda::cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};
use candle_core::{CudaDevice, DType, Result};
use ringspan::kernel::nvrtc::{ELEMENT, Modules, Source};
use std::sync::LazyLock;

/// Threads of a block.
pub(crate) const THREADS: usize = 256;

/// Bytes that a thread reads at once, where they begin at a multiple of it.
const AT_ONCE: usize = 16;

const PACK: &str = include_str!("source/pack.cu");
const NORM: &str = include_str!("source/norm.cu");
const ROPE: &str = include_str!("source/rope.cu");
const GATE: &str = include_str!("source/gate.cu");
const LOSS: &str = include_str!("source/loss.cu");
const SUM: &str = include_str!("source/sum.cu");

/// A layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Layer {
    Norm,
    Rope,
    Gate(Activation),
    Loss,
    Sum,
}

/// What kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Options {
    layer: Layer,
    /// F32 or BF16: of tensors, and of the weight of a norm, of the gradient of logits, or of what is added.
    types: [DType; 2],
    /// Elements that a thread reads at once.
    pub(crate) at_once: usize,
    job_bytes: usize,
}

impl Options {
    /// For tensors that lie at these addresses, whose rows have these sizes and distances.
    pub(crate) fn new<J>(layer: Layer, types: [DType; 2], addresses: &[u64], sizes: &[usize]) -> Self {
        let most = AT_ONCE / types[0].size_in_bytes();
        let whole = addresses.iter().all(|at| at.is_multiple_of(AT_ONCE as u64));
        let at_once = if whole && sizes.iter().all(|size| size.is_multiple_of(most)) { most } else { 1 };
        Self { layer, types, at_once, job_bytes: size_of::<J>() }
    }

    fn source(&self) -> Source {
        let text = match self.layer {
            Layer::Norm => NORM,
            Layer::Rope => ROPE,
            Layer::Gate(_) => GATE,
            Layer::Loss => LOSS,
            Layer::Sum => SUM,
        };
        let stored = |dtype| usize::from(dtype == DType::BF16);
        Source {
            text: [ELEMENT, PACK, text].concat(),
            definitions: vec![
                ("X_TYPE", stored(self.types[0])),
                ("W_TYPE", stored(self.types[1])),
                ("AT_ONCE", self.at_once),
                ("THREADS", THREADS),
                ("JOB_BYTES", self.job_bytes),
                ("GELU", usize::from(self.layer == Layer::Gate(Activation::GeluTanh))),
            ],
            specific: false,
        }
    }
}

/// Of each GPU by its context, of which the driver has one for all of the process.
static MODULES: LazyLock<Modules<(usize, Options)>> = LazyLock::new(Modules::default);

/// Starts a kernel with `grid` blocks of threads, none of which has more than 48 KiB of shared memory.
///
/// # Errors
/// More blocks than a launch has, no compiler, a driver that refuses.
///
/// # Safety
/// The kernel reads and writes what the job says: it must be there, in the types of the options.
pub(crate) unsafe fn launch<J: DeviceRepr>(
    device: &CudaDevice,
    options: &Options,
    name: &str,
    job: &J,
    grid: (usize, usize),
    shared_bytes: usize,
) -> Result<()> {
    let stream = device.cuda_stream();
    let (context, count) = (stream.context(), |size: usize| u32::try_from(size).map_err(candle_core::Error::wrap));
    let key = (context.cu_ctx() as usize, *options);
    let module = MODULES.get(key, context, || options.source()).map_err(candle_core::Error::wrap)?;
    let function = module.load_function(name).map_err(candle_core::Error::wrap)?;
    let config = LaunchConfig {
        grid_dim: (count(grid.0)?, count(grid.1)?, 1),
        block_dim: (THREADS as u32, 1, 1),
        shared_mem_bytes: count(shared_bytes)?,
    };
    // SAFETY: the kernel takes this job, of the size it was compiled with; what is in it, the caller promises.
    let started = unsafe { stream.launch_builder(&function).arg(job).launch(config) };
    started.map(drop).map_err(candle_core::Error::wrap)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{loss, norm, residual, rope, swiglu};
    use ringspan::kernel::nvrtc;

    /// Without a GPU this still shows that the kernels are CUDA, and agree on the jobs' sizes.
    #[test]
    fn kernels_of_layers_compile_for_every_architecture_since_ampere() {
        if !nvrtc::is_there() {
            println!("skipped: no NVRTC (libnvrtc.so) on this machine");
            return;
        }
        let layers = [
            (Layer::Norm, size_of::<norm::on_gpu::Job>()),
            (Layer::Rope, size_of::<rope::on_gpu::Job>()),
            (Layer::Gate(Activation::Silu), size_of::<swiglu::on_gpu::Job>()),
            (Layer::Gate(Activation::GeluTanh), size_of::<swiglu::on_gpu::Job>()),
            (Layer::Loss, size_of::<loss::on_gpu::Job>()),
            (Layer::Sum, size_of::<residual::on_gpu::Job>()),
        ];
        let types = [DType::F32, DType::BF16];
        for architecture in ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"] {
            for (layer, job_bytes) in layers {
                for types in types.into_iter().flat_map(|x| types.map(|weight| [x, weight])) {
                    for at_once in [1, AT_ONCE / types[0].size_in_bytes()] {
                        let options = Options { layer, types, at_once, job_bytes };
                        let binary = options.source().compile(architecture).unwrap_or_else(|error| panic!("{error}"));
                        // That made of a CPU has no machine code of a GPU.
                        match binary.starts_with(b"\x7fELF") {
                            true => println!("{architecture}: {options:?}, {} bytes", binary.len()),
                            false => println!("skipped: no compiler for {architecture}"),
                        }
                    }
                }
            }
        }
    }
}
