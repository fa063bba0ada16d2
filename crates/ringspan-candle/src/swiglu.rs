//! The gated activation of Llama's feed-forward layer as one operation with a backward (Shazeer, 2020).

use crate::slices::{cpu, values};
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};

/// `silu(gate) * up`, element by element: two f32 tensors of one shape.
///
/// # Errors
/// Other types, and unequal shapes.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.shape() != up.shape() {
        bail!("swiglu of {:?} and {:?}: the shapes differ", gate.shape(), up.shape());
    }
    gate.contiguous()?.apply_op2(&up.contiguous()?, SwiGlu)
}

struct SwiGlu;

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

impl CustomOp2 for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(&self, g: &CpuStorage, g_at: &Layout, u: &CpuStorage, u_at: &Layout) -> Result<(CpuStorage, Shape)> {
        let out = cpu(g, g_at)?.iter().zip(cpu(u, u_at)?).map(|(g, u)| g * sigmoid(*g) * u).collect();
        Ok((CpuStorage::F32(out), g_at.shape().clone()))
    }

    fn bwd(&self, gate: &Tensor, up: &Tensor, _out: &Tensor, d: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let d = d.contiguous()?;
        let (d_gate, d_up) = values(gate, |gate| {
            values(up, |up| {
                values(&d, |d| {
                    let one = |((&g, &u), &d): ((&f32, &f32), &f32)| {
                        let s = sigmoid(g);
                        (d * u * s * (1.0 + g * (1.0 - s)), d * g * s)
                    };
                    Ok(gate.iter().zip(up).zip(d).map(one).unzip::<f32, f32, Vec<_>, Vec<_>>())
                })
            })
        })?;
        let tensor = |values, like: &Tensor| Tensor::from_vec(values, like.shape(), like.device()).map(Some);
        Ok((tensor(d_gate, gate)?, tensor(d_up, up)?))
    }
}
