//! Root-mean-square normalisation as one operation with a backward (Zhang and Sennrich, 2019).

use crate::slices::{cpu, values};
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension: x `[.., C]`, weight `[C]`, f32.
///
/// # Errors
/// Other types, and a weight of another width than x.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let width = x.dims().last().copied().unwrap_or(0);
    if weight.dims() != [width] {
        candle_core::bail!("rms_norm of {:?} needs a weight [{width}], given {:?}", x.shape(), weight.shape());
    }
    x.contiguous()?.apply_op2(&weight.contiguous()?, RmsNorm { eps })
}

struct RmsNorm {
    eps: f64,
}

impl RmsNorm {
    /// 1 / root mean square of a row.
    fn inverse(&self, row: &[f32]) -> f32 {
        let squares: f64 = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        (1.0 / (squares / row.len() as f64 + self.eps).sqrt()) as f32
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(&self, x: &CpuStorage, x_at: &Layout, w: &CpuStorage, w_at: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, w) = (cpu(x, x_at)?, cpu(w, w_at)?);
        let mut out = Vec::with_capacity(x.len());
        for row in x.chunks_exact(w.len().max(1)) {
            let inverse = self.inverse(row);
            out.extend(row.iter().zip(w).map(|(x, w)| x * inverse * w));
        }
        Ok((CpuStorage::F32(out), x_at.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _out: &Tensor, d_out: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let d_out = d_out.contiguous()?;
        let (dx, dw) = values(x, |xs| {
            values(w, |ws| {
                values(&d_out, |gs| {
                    let width = ws.len().max(1);
                    let (mut dx, mut dw) = (Vec::with_capacity(xs.len()), vec![0.0f32; ws.len()]);
                    for (row, g) in xs.chunks_exact(width).zip(gs.chunks_exact(width)) {
                        let inverse = self.inverse(row);
                        // d/dx of x_i * r(x): r * (w g)_i - x_i * r^3 * mean(x w g).
                        let dot: f32 = row.iter().zip(ws).zip(g).map(|((x, w), g)| x * w * g).sum();
                        let shared = dot * inverse * inverse * inverse / width as f32;
                        for (i, ((x, w), g)) in row.iter().zip(ws).zip(g).enumerate() {
                            dx.push(inverse * w * g - x * shared);
                            dw[i] += g * x * inverse;
                        }
                    }
                    Ok((dx, dw))
                })
            })
        })?;
        let tensor = |values, like: &Tensor| Tensor::from_vec(values, like.shape(), like.device()).map(Some);
        Ok((tensor(dx, x)?, tensor(dw, w)?))
    }
}
