//! Root-mean-square normalisation as one operation with a backward pass (Zhang and Sennrich, 2019).

#[cfg_attr(not(feature = "cuda"), path = "norm/without_gpu.rs")]
pub(crate) mod on_gpu;

use crate::cast::cast;
use crate::cast::wide_values;
use crate::number::{Number, with_number};
use crate::slices::{elements, elements_of, widened};
use crate::tape::{self, Reads};
use crate::{gpu, pool};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Result, Shape, Tensor, WithDType};

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dim: x `[.., C]`, weight `[C]`, f32 or bf16; the result is rounded
/// once.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan_candle::norm::rms_norm;
///
/// let x = Tensor::new(&[[3f32, -3.0]], &Device::Cpu)?;
/// let weight = Tensor::new(&[1f32, 2.0], &Device::Cpu)?;
/// assert_eq!(rms_norm(&x, &weight, 0.0)?.to_vec2::<f32>()?, [[1.0, -2.0]]);
/// # Ok::<_, candle_core::Error>(())
/// ```
///
/// # Errors
/// Other types, and a weight of another width than x.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let width = x.dims().last().copied().unwrap_or(0);
    if weight.dims() != [width] {
        candle_core::bail!("rms_norm of {:?} needs a weight [{width}], given {:?}", x.shape(), weight.shape());
    }
    tape::apply_recomputable(RmsNorm { eps }, [&gpu::readable(x)?, &weight.contiguous()?], Reads::Inputs)
}

#[derive(Clone)]
struct RmsNorm {
    eps: f64,
}

/// A sum has this many independent partial sums, so that it vectorises.
const LANES: usize = 16;

/// `sum of f(i)` for `i < count`: LANES partial sums in f32, which are then added in f64.
#[inline(always)]
fn sum(count: usize, f: impl Fn(usize) -> f32) -> f64 {
    let mut sums = [0.0f32; LANES];
    for start in (0..count / LANES).map(|chunk| chunk * LANES) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            *sum += f(start + lane);
        }
    }
    let rest: f64 = (count / LANES * LANES..count).map(|i| f64::from(f(i))).sum();
    sums.iter().map(|&sum| f64::from(sum)).sum::<f64>() + rest
}

impl RmsNorm {
    /// 1 / root mean square of a row.
    #[inline(always)]
    fn inverse<T: Number>(&self, row: &[T]) -> f32 {
        (1.0 / (sum(row.len(), |i| row[i].upcast() * row[i].upcast()) / row.len() as f64 + self.eps).sqrt()) as f32
    }

    #[inline(always)]
    fn forward<T: Number>(&self, x: &[T], w: &[f32], out: &mut [T]) {
        let width = w.len().max(1);
        for (row, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            let inverse = self.inverse(row);
            for ((out, x), w) in out.iter_mut().zip(row).zip(w) {
                *out = T::round_from(x.upcast() * inverse * w);
            }
        }
    }

    /// Writes the gradient of x, and returns the contribution of these rows to the gradient of the weight.
    #[inline(always)]
    fn backward<T: Number>(&self, x: &[T], w: &[f32], g: &[T], dx: &mut [T]) -> Vec<f32> {
        let width = w.len().max(1);
        let mut dw = vec![0.0f32; w.len()];
        for ((row, g), dx) in x.chunks_exact(width).zip(g.chunks_exact(width)).zip(dx.chunks_exact_mut(width)) {
            let inverse = self.inverse(row);
            // d/dx of x_i * r(x): r * (w g)_i - x_i * r^3 * mean(x w g).
            let (row, g, w) = (&row[..width], &g[..width], &w[..width]);
            let dot = sum(width, |i| row[i].upcast() * w[i] * g[i].upcast());
            let shared = (dot / width as f64) as f32 * inverse * inverse * inverse;
            for ((((dx, dw), x), g), w) in dx.iter_mut().zip(&mut dw).zip(row).zip(g).zip(w) {
                let (x, g) = (x.upcast(), g.upcast());
                *dx = T::round_from(inverse * w * g - x * shared);
                *dw += g * x * inverse;
            }
        }
        dw
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(&self, x: &CpuStorage, x_at: &Layout, w: &CpuStorage, w_at: &Layout) -> Result<(CpuStorage, Shape)> {
        let w = &*widened(w, w_at)?;
        let out = with_number!(x.dtype(), T => {
            let (x, width) = (elements::<T>(x, x_at)?, w.len().max(1));
            T::to_cpu_storage_owned(pool::map_copy(x, pool::part(x.len() / width, width) * width, |first, out| {
                let x = &x[first..first + out.len()];
                pool::vectorized(#[inline(always)] || self.forward(x, w, out));
            }))
        });
        Ok((out, x_at.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, x_at: &Layout, w: &CudaStorage, w_at: &Layout) -> Result<(CudaStorage, Shape)> {
        on_gpu::forward((x, x_at), (w, w_at), self.eps)
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _out: &Tensor, d_out: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        if gpu::holds(x) {
            let (dx, dw) = on_gpu::backward(x, w, d_out, None, self.eps)?;
            return Ok((Some(dx), dw));
        }
        let d_out = d_out.contiguous()?;
        with_number!(x.dtype(), T => {
            let (dx, dw) = elements_of::<T, _>(x, |xs| {
                wide_values(w, |ws| {
                    elements_of::<T, _>(&d_out, |gs| {
                        let width = ws.len().max(1);
                        let (mut dx, mut dw) = (vec![T::ZERO; xs.len()], vec![0.0f32; ws.len()]);
                        let part = pool::part(xs.len() / width, width) * width;
                        let parts = xs.chunks(part).zip(gs.chunks(part)).zip(dx.chunks_mut(part)).collect();
                        let sums = pool::map(parts, |((x, g), dx): ((&[T], &[T]), &mut [T])| {
                            pool::vectorized(#[inline(always)] || self.backward(x, ws, g, dx))
                        });
                        for part in sums {
                            dw.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
                        }
                        Ok((dx, dw))
                    })
                })
            })?;
            let dw = Tensor::from_vec(dw, w.shape(), w.device())?;
            Ok((Some(Tensor::from_vec(dx, x.shape(), x.device())?), Some(cast(&dw, w.dtype())?)))
        })
    }
}
