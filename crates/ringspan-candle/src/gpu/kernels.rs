//! The CUDA kernels of fused layers: compiled on first use, once for each GPU, and launched on candle's stream.

use crate::activation::Activation;
use candle_core::cuda::cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};
use candle_core::{CudaDevice, DType, Result};
use ringspan_cuda::nvrtc::{ELEMENT, Modules, Source};
use std::sync::LazyLock;

/// Threads in a block.
pub(crate) const THREADS: usize = 256;

/// Bytes that a thread reads at once from an address that is a multiple of this number.
const AT_ONCE: usize = 16;

const PACK: &str = include_str!("source/pack.cu");
const NORM: &str = include_str!("source/norm.cu");
const ROPE: &str = include_str!("source/rope.cu");
const GATE: &str = include_str!("source/gate.cu");
const LOSS: &str = include_str!("source/loss.cu");
const SUM: &str = include_str!("source/sum.cu");

/// A kind of layer, with a source file of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Layer {
    Norm,
    Rope,
    Gate(Activation),
    Loss,
    Sum,
}

/// The options with which kernels are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Options {
    layer: Layer,
    /// F32 or BF16: the type of tensors, and the type of the norm's weight, of the gradient of logits, or of the summand.
    types: [DType; 2],
    /// Number of elements that a thread reads at once.
    pub(crate) at_once: usize,
    params_bytes: usize,
}

impl Options {
    /// Options for tensors at these addresses, whose rows have these sizes and distances in elements.
    pub(crate) fn new<J>(layer: Layer, types: [DType; 2], addresses: &[u64], sizes: &[usize]) -> Self {
        let most = AT_ONCE / types[0].size_in_bytes();
        let whole = addresses.iter().all(|at| at.is_multiple_of(AT_ONCE as u64));
        let at_once = if whole && sizes.iter().all(|size| size.is_multiple_of(most)) { most } else { 1 };
        Self { layer, types, at_once, params_bytes: size_of::<J>() }
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
                ("PARAMS_BYTES", self.params_bytes),
                ("GELU", usize::from(self.layer == Layer::Gate(Activation::GeluTanh))),
            ],
            specific: false,
        }
    }
}

/// Compiled kernels by GPU, identified by its context, of which the driver has one in the whole process.
static MODULES: LazyLock<Modules<(usize, Options)>> = LazyLock::new(Modules::default);

/// Launches a kernel with `grid` blocks of threads, each with at most 48 KiB of shared memory.
///
/// # Errors
/// More blocks than a launch can have, no compiler, failures of the driver.
///
/// # Safety
/// The kernel reads and writes the memory to which the parameters refer: it must be valid, in the types of the options.
pub(crate) unsafe fn launch<J: DeviceRepr>(
    device: &CudaDevice,
    options: &Options,
    name: &str,
    params: &J,
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
    // SAFETY: the kernel takes parameters of the size it was compiled with; the caller promises that they are valid.
    let started = unsafe { stream.launch_builder(&function).arg(params).launch(config) };
    started.map(drop).map_err(candle_core::Error::wrap)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{loss, norm, residual, rope, swiglu};
    use ringspan_cuda::nvrtc;

    /// Without a GPU, this still shows that the kernels are valid CUDA and agree with the host on the sizes of their parameters.
    #[test]
    fn kernels_of_layers_compile_for_every_architecture_since_ampere() {
        if !nvrtc::is_there() {
            println!("skipped: no NVRTC (libnvrtc.so) on this machine");
            return;
        }
        let layers = [
            (Layer::Norm, size_of::<norm::on_gpu::NormParams>()),
            (Layer::Rope, size_of::<rope::on_gpu::RopeParams>()),
            (Layer::Gate(Activation::Silu), size_of::<swiglu::on_gpu::SwigluParams>()),
            (Layer::Gate(Activation::GeluTanh), size_of::<swiglu::on_gpu::SwigluParams>()),
            (Layer::Loss, size_of::<loss::on_gpu::LossParams>()),
            (Layer::Sum, size_of::<residual::on_gpu::ResidualParams>()),
        ];
        let types = [DType::F32, DType::BF16];
        for architecture in ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"] {
            for (layer, params_bytes) in layers {
                for types in types.into_iter().flat_map(|x| types.map(|weight| [x, weight])) {
                    for at_once in [1, AT_ONCE / types[0].size_in_bytes()] {
                        let options = Options { layer, types, at_once, params_bytes };
                        let binary = options.source().compile(architecture).unwrap_or_else(|error| panic!("{error}"));
                        // The compiler of the emulated GPU does not return machine code of a GPU.
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
