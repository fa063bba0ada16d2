//! The residual sum on a GPU, where an f32 tensor may be added to a bf16 one: the sum is rounded once.

mod normed;

pub(super) use normed::residual_norm;

use crate::gpu::kernels::{Layer, Options, THREADS, launch};
use crate::gpu::operand::{Operand, unwritten};
use crate::gpu::zeros;
use candle_core::backend::BackendStorage;
use candle_core::cuda::cudarc::driver::DeviceRepr;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, bail};

/// The arguments of a kernel launch, laid out as in `gpu/source/sum.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ResidualParams {
    x: u64,
    y: u64,
    out: u64,
    count: i64,
}

// SAFETY: the struct consists of plain numbers and is laid out as in C.
unsafe impl DeviceRepr for ResidualParams {}

/// Computes the sum as an operation returns it, in the type of x: both are contiguous, and y has the type of x or f32.
pub(super) fn forward(
    (x, x_at): (&CudaStorage, &Layout),
    (y, y_at): (&CudaStorage, &Layout),
) -> Result<(CudaStorage, Shape)> {
    let (device, shape, types) = (x.device(), x_at.shape(), [x.dtype(), y.dtype()]);
    if types[0] != types[1] && types != [DType::BF16, DType::F32] {
        bail!("{:?} and {:?} cannot be added: the types differ", types[0], types[1]);
    }
    let count = shape.elem_count();
    if count == 0 {
        return zeros(x, shape);
    }
    let (mut out, stream) = (unwritten(device, shape, types[0])?, device.cuda_stream());
    {
        let (x, y) = (Operand::read(x, x_at, &stream)?, Operand::read(y, y_at, &stream)?);
        let written = Operand::written(&mut out, &stream)?;
        let options = Options::new::<ResidualParams>(Layer::Sum, types, &[x.at, y.at, written.at], &[count]);
        let params = ResidualParams { x: x.at, y: y.at, out: written.at, count: count as i64 };
        let blocks = (count / options.at_once).div_ceil(THREADS);
        // SAFETY: x and y have `count` elements each, and the sum has memory for as many.
        unsafe { launch(device, &options, "sum", &params, (blocks, 1), 0)? };
    }
    Ok((out, shape.clone()))
}
