//! An activation function as one operation with a backward pass.

use crate::activation::Activation;
use crate::number::with_number;
use crate::slices::{elements, elements_of};
use crate::tape::{self, Reads};
use crate::{gpu, pool};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType};

/// The activation of each element of x, f32 or bf16; it is computed in f32 and rounded once.
///
/// # Errors
/// Other types.
pub fn activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    if gpu::holds(x) {
        return match activation {
            Activation::Silu => x.silu(),
            Activation::GeluTanh => x.gelu(),
        };
    }
    tape::apply(Activate(activation), [&x.contiguous()?], Reads::Inputs)
}

struct Activate(Activation);

/// Elements that a thread takes at a time.
const PART: usize = 1 << 14;

impl CustomOp1 for Activate {
    fn name(&self) -> &'static str {
        "activate"
    }

    fn cpu_fwd(&self, x: &CpuStorage, at: &Layout) -> Result<(CpuStorage, Shape)> {
        let out = with_number!(x.dtype(), T => {
            T::to_cpu_storage_owned(pool::map_copy(elements::<T>(x, at)?, PART, |_, part| self.0.apply_in_place(part)))
        });
        Ok((out, at.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, d_out: &Tensor) -> Result<Option<Tensor>> {
        let d_out = d_out.contiguous()?;
        let dx = with_number!(x.dtype(), T => elements_of::<T, _>(x, |xs| {
            let slopes = |first: usize, dx: &mut [T]| self.0.slopes_in_place(&xs[first..first + dx.len()], dx);
            let dx = elements_of::<T, _>(&d_out, |d| Ok(pool::map_copy(d, PART, slopes)))?;
            Tensor::from_vec(dx, x.shape(), x.device())
        })?);
        Ok(Some(dx))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backward_from;
    use candle_core::{Device, Var};

    #[test]
    fn values_and_gradients_are_those_of_candle() -> Result<()> {
        let x = Var::from_tensor(&(Tensor::randn(0f32, 3.0, (3, PART / 2 + 1), &Device::Cpu)?))?;
        let dy = Tensor::randn(0f32, 1.0, x.shape(), &Device::Cpu)?;
        for (activation, plain) in [(Activation::Silu, x.silu()?), (Activation::GeluTanh, x.gelu()?)] {
            let out = activate(&x, activation)?;
            let of = |out: &Tensor| Ok::<_, candle_core::Error>(backward_from::backward(out, &dy)?.get(&x).cloned());
            let (Some(got), Some(wanted)) = (of(&out)?, of(&plain)?) else { panic!("{activation:?} has a gradient") };
            for (got, wanted) in [(out, plain), (got, wanted)] {
                let far = (got - wanted)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
                assert!(far < 2e-5, "{activation:?}: {far}");
            }
        }
        Ok(())
    }
}
