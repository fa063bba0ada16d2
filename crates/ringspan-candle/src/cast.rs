//! From one type of numbers to another, as an operation with a backward.

use crate::gpu;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor};

/// x in the type `to`, rounded to the nearest; as it is, if it has that type. The gradient comes back in the type of x.
///
/// Candle's own conversion starts a kernel for a tensor without elements, which a GPU refuses.
///
/// # Errors
/// A GPU without memory for it.
pub fn cast(x: &Tensor, to: DType) -> Result<Tensor> {
    match x.dtype() == to {
        true => Ok(x.clone()),
        false if gpu::holds(x) => x.apply_op1(Cast { to }),
        false => x.to_dtype(to),
    }
}

struct Cast {
    to: DType,
}

impl CustomOp1 for Cast {
    fn name(&self) -> &'static str {
        "cast"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        candle_core::bail!("made for tensors on a GPU")
    }

    fn cuda_fwd(&self, x: &CudaStorage, at: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((gpu::converted(x, at, self.to)?, at.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, d: &Tensor) -> Result<Option<Tensor>> {
        cast(d, x.dtype()).map(Some)
    }
}
