//! Layer normalisation on the CPU, with weights and biases that depend on the token.

use super::TableRows;
use super::tables::{by_parts, copy_by_parts, table_gradients};
use crate::cast::wide_values;
use crate::number::{Number, with_number};
use crate::slices::{elements, elements_of, widened};
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, WithDType};
use std::ops::Range;

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

/// [`layer_norm`](super::layer_norm) of x `[T, C]` with weights and biases `[M, C]`.
pub(super) struct LayerNorm {
    pub(super) rows: TableRows,
    pub(super) eps: f64,
}

impl LayerNorm {
    /// Mean and 1 / deviation of a row.
    #[inline(always)]
    fn statistics<T: Number>(&self, row: &[T]) -> (f32, f32) {
        let count = row.len().max(1) as f64;
        let mean = (sum(row.len(), |i| row[i].upcast()) / count) as f32;
        let squares = sum(row.len(), |i| (row[i].upcast() - mean) * (row[i].upcast() - mean));
        (mean, (1.0 / (squares / count + self.eps).sqrt()) as f32)
    }

    #[inline(always)]
    fn forward<T: Number>(&self, tokens: Range<usize>, x: &[T], out: &mut [T], [w, b]: [&[f32]; 2], width: usize) {
        for ((token, row), out) in tokens.zip(x.chunks_exact(width)).zip(out.chunks_exact_mut(width)) {
            let (mean, inverse) = self.statistics(row);
            let at = self.rows.of(token) * width;
            let (w, b) = (&w[at..at + width], &b[at..at + width]);
            for (((out, x), w), b) in out.iter_mut().zip(row).zip(w).zip(b) {
                *out = T::round_from((x.upcast() - mean) * inverse * w + b);
            }
        }
    }

    /// Writes the gradient of x to `dx`, where the gradient of the output is, and adds those of the tables to `dw` and `db`.
    #[inline(always)]
    fn backward<T: Number>(&self, tokens: Range<usize>, x: &[T], dx: &mut [T], w: &[f32], [dw, db]: [&mut [f32]; 2]) {
        let width = x.len() / tokens.len().max(1);
        for ((token, row), dx) in tokens.zip(x.chunks_exact(width)).zip(dx.chunks_exact_mut(width)) {
            let (mean, inverse) = self.statistics(row);
            let at = self.rows.of(token) * width;
            let (w, dw, db) = (&w[at..at + width], &mut dw[at..at + width], &mut db[at..at + width]);
            let normed = |i: usize| (row[i].upcast() - mean) * inverse;
            // With g = w dy: dx = (g - mean(g) - normed * mean(g * normed)) / deviation.
            let of_mean = (sum(width, |i| dx[i].upcast() * w[i]) / width as f64) as f32;
            let of_deviation = (sum(width, |i| dx[i].upcast() * w[i] * normed(i)) / width as f64) as f32;
            for i in 0..width {
                let dy = dx[i].upcast();
                dw[i] += dy * normed(i);
                db[i] += dy;
                dx[i] = T::round_from((dy * w[i] - of_mean - normed(i) * of_deviation) * inverse);
            }
        }
    }
}

impl CustomOp3 for LayerNorm {
    fn name(&self) -> &'static str {
        "layer-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_at: &Layout,
        w: &CpuStorage,
        w_at: &Layout,
        b: &CpuStorage,
        b_at: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let (w, b, (_, width)) = (&*widened(w, w_at)?, &*widened(b, b_at)?, x_at.shape().dims2()?);
        let out = with_number!(x.dtype(), T => {
            let x = elements::<T>(x, x_at)?;
            T::to_cpu_storage_owned(copy_by_parts(x, width, #[inline(always)] |tokens, out| {
                self.forward(tokens.clone(), &x[tokens.start * width..tokens.end * width], out, [w, b], width);
            }))
        });
        Ok((out, x_at.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        b: &Tensor,
        _out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (d_out, width) = (d_out.contiguous()?, x.dim(1)?);
        with_number!(x.dtype(), T => {
            let (dx, sums) = elements_of::<T, _>(x, |xs| {
                wide_values(w, |ws| {
                    let mut dx = elements_of::<T, _>(&d_out, |dy| Ok(dy.to_vec()))?;
                    let sums = by_parts(xs, &mut dx, width, |tokens, x, dx| {
                        let (mut dw, mut db) = (vec![0.0f32; ws.len()], vec![0.0f32; ws.len()]);
                        self.backward(tokens, x, dx, ws, [&mut dw, &mut db]);
                        [dw, db]
                    });
                    Ok((dx, sums))
                })
            })?;
            let [dw, db] = table_gradients(sums, [w, b])?;
            Ok((Some(Tensor::from_vec(dx, x.shape(), x.device())?), Some(dw), Some(db)))
        })
    }
}
