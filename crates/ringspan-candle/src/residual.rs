//! The residual sum of a layer's input and output.

#[cfg_attr(not(feature = "cuda"), path = "residual/without_gpu.rs")]
pub(crate) mod on_gpu;

use crate::cast::cast;
use crate::gpu;
use crate::norm::rms_norm;
use crate::number::with_number;
use crate::slices::elements;
use crate::sum::added;
use crate::tape::{self, Reads};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType, bail};

/// `x + y`, two tensors of one shape, each f32 or bf16, computed on the rank's threads. The sum has the type of x, and is
/// rounded once.
///
/// Candle's own addition runs on the process's global threads, and drops y from the graph if it has no elements: a rank
/// without rows would then miss the collectives of the other ranks' backward passes.
///
/// # Errors
/// Other types, and unequal shapes.
pub fn residual(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    if x.shape() != y.shape() {
        bail!("{:?} and {:?} cannot be added: the shapes differ", x.shape(), y.shape());
    }
    if tape::is_unused(x) || tape::is_unused(y) {
        return residual_unused(x, y);
    }
    tape::apply(Residual, [&x.contiguous()?, &y.contiguous()?], Reads::Nothing)
}

/// Like [`residual`], where nothing reads the sum: on a tape it is recorded but not computed.
///
/// # Errors
/// As for [`residual`].
pub(crate) fn residual_unused(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    if x.shape() != y.shape() {
        bail!("{:?} and {:?} cannot be added: the shapes differ", x.shape(), y.shape());
    }
    match tape::is_recording() && x.device().is_cpu() {
        true => tape::apply_unused(Residual, [x, y], Reads::Nothing, (x.shape(), x.dtype())),
        false => residual(x, y),
    }
}

/// Returns `x + y` and the [`rms_norm`] of this sum; on a GPU one kernel computes both, and one kernel their gradients.
///
/// # Errors
/// As for [`residual`] and [`rms_norm`].
pub fn residual_norm(x: &Tensor, y: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    if gpu::holds(x)
        && x.elem_count() > 0
        && (x.shape(), x.dtype()) == (y.shape(), y.dtype())
        && x.dims().last().is_some_and(|width| weight.dims() == [*width])
    {
        return on_gpu::residual_norm(x, y, weight, eps);
    }
    let sum = residual(x, y)?;
    let normed = rms_norm(&sum, weight, eps)?;
    Ok((sum, normed))
}

struct Residual;

impl CustomOp2 for Residual {
    fn name(&self) -> &'static str {
        "residual"
    }

    fn cpu_fwd(&self, x: &CpuStorage, x_at: &Layout, y: &CpuStorage, y_at: &Layout) -> Result<(CpuStorage, Shape)> {
        let out = with_number!(x.dtype(), T => {
            with_number!(y.dtype(), U => T::to_cpu_storage_owned(added(elements::<T>(x, x_at)?, elements::<U>(y, y_at)?)))
        });
        Ok((out, x_at.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, x_at: &Layout, y: &CudaStorage, y_at: &Layout) -> Result<(CudaStorage, Shape)> {
        on_gpu::forward((x, x_at), (y, y_at))
    }

    fn bwd(&self, _: &Tensor, y: &Tensor, _: &Tensor, d: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some(d.clone()), Some(cast(d, y.dtype())?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backward_from;
    use candle_core::{Device, Var};

    #[test]
    fn both_summands_stay_in_the_graph_even_without_elements() -> Result<()> {
        for rows in [0, 3] {
            let x = Var::ones((rows, 4), candle_core::DType::F32, &Device::Cpu)?;
            let y = Var::ones((rows, 4), candle_core::DType::F32, &Device::Cpu)?;
            let sum = residual(x.as_tensor(), y.as_tensor())?;
            let gradients = backward_from::backward(&sum, &(sum.detach() * 3.0)?)?;
            for part in [&x, &y] {
                let gradient =
                    gradients.get(part.as_tensor()).map(|d| d.flatten_all()?.to_vec1::<f32>()).transpose()?;
                assert_eq!(gradient, Some(vec![6.0; 4 * rows]));
            }
        }
        assert!(residual(&Tensor::new(&[1f32], &Device::Cpu)?, &Tensor::new(&[1f32, 2.0], &Device::Cpu)?).is_err());
        Ok(())
    }
}
