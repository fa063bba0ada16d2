//! The gated activation of a feed-forward layer as one operation with a backward pass (Shazeer, 2020).

#[cfg_attr(not(feature = "cuda"), path = "swiglu/without_gpu.rs")]
pub(crate) mod on_gpu;

use crate::activation::Activation;
use crate::number::with_number;
use crate::slices::{elements, elements_of};
use crate::tape::{self, Reads};
use crate::{gpu, pool};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType, bail};

/// `silu(gate) * up`, element by element: two tensors of one shape, both f32 or both bf16.
///
/// # Errors
/// Other types, and unequal shapes.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gated(gate, up, Activation::Silu)
}

/// `gelu(gate) * up` with the tanh form of GELU, element by element: two tensors of one shape, both f32 or both bf16.
///
/// # Errors
/// Other types, and unequal shapes.
pub fn geglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gated(gate, up, Activation::GeluTanh)
}

/// `act(gate) * up`, element by element: two tensors of one shape, both f32 or both bf16.
///
/// # Errors
/// Other types, and unequal shapes.
pub fn gated(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    if gate.shape() != up.shape() {
        bail!("a gate of {:?} for {:?}: the shapes differ", gate.shape(), up.shape());
    }
    tape::apply(Gated(activation), [&gpu::readable(gate)?, &gpu::readable(up)?], Reads::Inputs)
}

struct Gated(Activation);

impl CustomOp2 for Gated {
    fn name(&self) -> &'static str {
        "gate"
    }

    fn cpu_fwd(&self, g: &CpuStorage, g_at: &Layout, u: &CpuStorage, u_at: &Layout) -> Result<(CpuStorage, Shape)> {
        let out = with_number!(g.dtype(), T => {
            let (gate, up) = (elements::<T>(g, g_at)?, elements::<T>(u, u_at)?);
            let gated = |first: usize, out: &mut [T]| self.0.gate_in_place(out, &up[first..first + out.len()]);
            T::to_cpu_storage_owned(pool::map_copy(gate, pool::part(gate.len(), 1), gated))
        });
        Ok((out, g_at.shape().clone()))
    }

    fn cuda_fwd(&self, g: &CudaStorage, g_at: &Layout, u: &CudaStorage, u_at: &Layout) -> Result<(CudaStorage, Shape)> {
        on_gpu::forward((g, g_at), (u, u_at), self.0)
    }

    fn bwd(&self, gate: &Tensor, up: &Tensor, _out: &Tensor, d: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        if gpu::holds(gate) {
            let [d_gate, d_up] = on_gpu::backward(gate, up, d, self.0)?;
            return Ok((Some(d_gate), Some(d_up)));
        }
        with_number!(gate.dtype(), T => {
            let copy = |tensor: &Tensor| elements_of(tensor, |values: &[T]| Ok(values.to_vec()));
            let (mut d_gate, mut d_up) = (copy(gate)?, copy(up)?);
            elements_of(&d.contiguous()?, |d: &[T]| {
                let part = pool::part(d.len(), 1);
                let parts = d_gate.chunks_mut(part).zip(d_up.chunks_mut(part)).zip(d.chunks(part)).collect();
                pool::map(parts, |((gate, up), d): ((&mut [T], &mut [T]), &[T])| {
                    self.0.gate_gradients_in_place(gate, up, d);
                });
                Ok(())
            })?;
            let tensor = |values, like: &Tensor| Tensor::from_vec(values, like.shape(), like.device()).map(Some);
            Ok((tensor(d_gate, gate)?, tensor(d_up, up)?))
        })
    }
}
