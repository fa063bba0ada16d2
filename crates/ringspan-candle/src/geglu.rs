//! The gated activation of Gemma's feed-forward layer as one operation with a backward pass (Shazeer, 2020).

use crate::activation::Activation;
use crate::gpu;
use crate::number::{Number, with_number};
use crate::slices::{elements, elements_of};
use crate::swiglu::gated;
use crate::tape::{self, Reads};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType, bail};

/// `gelu(gate) * up`, element by element: two tensors of one shape, both f32 or both bf16. The gelu is the approximation by a tanh
/// (Hendrycks and Gimpel, 2016), which Hugging Face calls `gelu_pytorch_tanh`.
///
/// # Errors
/// Other types, and unequal shapes.
pub fn geglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.shape() != up.shape() {
        bail!("geglu of {:?} and {:?}: the shapes differ", gate.shape(), up.shape());
    }
    if gpu::holds(gate) {
        return gated(gate, up, Activation::GeluTanh);
    }
    tape::apply(GeGlu, [&gate.contiguous()?, &up.contiguous()?], Reads::Inputs)
}

struct GeGlu;

/// sqrt(2 / pi)
const ROOT: f32 = 0.797_884_6;
const CUBE: f32 = 0.044_715;

/// gelu(x) and its derivative at x.
fn gelu(x: f32) -> (f32, f32) {
    let t = (ROOT * (x + CUBE * x * x * x)).tanh();
    let slope = ROOT * (1.0 + 3.0 * CUBE * x * x);
    (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)
}

impl CustomOp2 for GeGlu {
    fn name(&self) -> &'static str {
        "geglu"
    }

    fn cpu_fwd(&self, g: &CpuStorage, g_at: &Layout, u: &CpuStorage, u_at: &Layout) -> Result<(CpuStorage, Shape)> {
        let out = with_number!(g.dtype(), T => {
            let both = elements::<T>(g, g_at)?.iter().zip(elements::<T>(u, u_at)?);
            T::to_cpu_storage_owned(both.map(|(g, u)| T::round_from(gelu(g.upcast()).0 * u.upcast())).collect())
        });
        Ok((out, g_at.shape().clone()))
    }

    fn bwd(&self, gate: &Tensor, up: &Tensor, _out: &Tensor, d: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let d = d.contiguous()?;
        with_number!(gate.dtype(), T => {
            let (d_gate, d_up) = elements_of(gate, |gate: &[T]| {
                elements_of(up, |up: &[T]| {
                    elements_of(&d, |d: &[T]| {
                        let one = |((g, u), d): ((&T, &T), &T)| {
                            let ((value, slope), d) = (gelu(g.upcast()), d.upcast());
                            (T::round_from(d * u.upcast() * slope), T::round_from(d * value))
                        };
                        Ok(gate.iter().zip(up).zip(d).map(one).unzip::<T, T, Vec<_>, Vec<_>>())
                    })
                })
            })?;
            let tensor = |values, like: &Tensor| Tensor::from_vec(values, like.shape(), like.device()).map(Some);
            Ok((tensor(d_gate, gate)?, tensor(d_up, up)?))
        })
    }
}
