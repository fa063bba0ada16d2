//! Conversion between f32 and bf16 as an operation with a backward pass.

use crate::gpu;
use crate::number::{Number, convert, with_number};
use crate::slices::{self, elements};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, WithDType};

/// Converts x to type `to`, rounding to the nearest; x is returned as it is if it has that type. The gradient is converted
/// back to the type of x.
///
/// Candle's own conversion starts a kernel for a tensor without elements, which a GPU refuses, and on the CPU has one thread.
///
/// # Errors
/// Other types than f32 and bf16, a GPU without memory for it.
pub fn cast(x: &Tensor, to: DType) -> Result<Tensor> {
    match x.dtype() == to {
        true => Ok(x.clone()),
        false if gpu::holds(x) => x.apply_op1(Cast { to }),
        false => x.contiguous()?.apply_op1(Cast { to }),
    }
}

/// The sum over the rows of x `[T, C]`, `[C]`. On the CPU it is f32, since candle would round a bf16 sum after every
/// addition.
///
/// # Errors
/// Other shapes.
pub(crate) fn sum_of_rows(x: &Tensor) -> Result<Tensor> {
    if gpu::holds(x) { x.sum(0) } else { cast(x, DType::F32)?.sum(0) }
}

/// Calls `f` with the elements of a contiguous tensor on the CPU in f32; bf16 elements are converted.
pub(crate) fn wide_values<R>(tensor: &Tensor, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    slices::values(&cast(tensor, DType::F32)?, f)
}

struct Cast {
    to: DType,
}

impl CustomOp1 for Cast {
    fn name(&self) -> &'static str {
        "cast"
    }

    fn cpu_fwd(&self, x: &CpuStorage, at: &Layout) -> Result<(CpuStorage, Shape)> {
        let out = with_number!(x.dtype(), T => with_number!(self.to, U => {
            let x = elements::<T>(x, at)?;
            let mut out = vec![U::ZERO; x.len()];
            convert(x, &mut out);
            U::to_cpu_storage_owned(out)
        }));
        Ok((out, at.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, at: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((gpu::converted(x, at, self.to)?, at.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, d: &Tensor) -> Result<Option<Tensor>> {
        cast(d, x.dtype()).map(Some)
    }
}
