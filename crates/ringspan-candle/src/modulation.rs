//! Layer normalisation and residual sums whose factors depend on the token (adaptive layer norm; Peebles and Xie, 2022,
//! arXiv:2212.09748), each as one operation with a backward pass.
//!
//! Factors are tables `[M, C]`, one row for each condition (a time step of a diffusion, a batch row), and [`TableRows`] says which
//! row a token takes. So factors of many tokens with few conditions are never spread over the tokens.
//!
//! Shape letters: T tokens of this rank, C width, M rows of a table.

use crate::cast::{cast, wide_values};
use crate::number::{Number, with_number};
use crate::slices::{elements, elements_of, widened};
use crate::tape::{self, Reads};
use crate::{gpu, pool};
use candle_core::{CpuStorage, CustomOp3, D, DType, Layout, Result, Shape, Tensor, WithDType, bail};
use std::ops::Range;
use std::sync::Arc;

/// For each token the row of a table `[M, C]`.
#[derive(Debug, Clone, Default)]
pub struct TableRows(Option<Arc<[u32]>>);

impl TableRows {
    /// All tokens take the only row of a table.
    #[must_use]
    pub fn one() -> Self {
        Self(None)
    }

    /// Token t takes row `rows[t]`.
    #[must_use]
    pub fn each(rows: Vec<u32>) -> Self {
        Self(Some(rows.into()))
    }

    fn of(&self, token: usize) -> usize {
        self.0.as_ref().map_or(0, |rows| rows[token] as usize)
    }

    /// Checks that every token of x `[T, C]` has a row in tables of this shape.
    fn check(&self, x: &Tensor, tables: [&Tensor; 2]) -> Result<()> {
        let (tokens, width) = x.dims2()?;
        for table in tables {
            let (rows, of_row) = table.dims2()?;
            let most = self.0.as_ref().map_or(0, |rows| rows.iter().copied().max().unwrap_or(0)) as usize;
            let listed = self.0.as_ref().map_or(tokens, |rows| rows.len());
            if of_row != width || listed != tokens || most >= rows {
                bail!("{listed} tokens take rows up to {most} of a table {:?}, for x {:?}", table.shape(), x.shape());
            }
        }
        Ok(())
    }

    /// The rows of all tokens, `[T, C]`, by candle's operations.
    fn spread(&self, table: &Tensor, tokens: usize) -> Result<Tensor> {
        match &self.0 {
            None => table.broadcast_as((tokens, table.dim(1)?)),
            Some(rows) => table.index_select(&Tensor::from_slice(rows, rows.len(), table.device())?, 0),
        }
    }
}

/// `(x - mean) / sqrt(variance + eps) * weight + bias` over the last dim: x `[T, C]`, f32 or bf16, with the rows of `weight` and
/// `bias` `[M, C]` that `rows` names for each token (Ba et al., 2016). Sums are f32, and the result is rounded once, to the type
/// of x.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan_candle::modulation::{TableRows, layer_norm};
///
/// let x = Tensor::new(&[[1f32, 3.0], [5.0, 1.0]], &Device::Cpu)?;
/// let weight = Tensor::new(&[[1f32, 1.0], [10.0, 10.0]], &Device::Cpu)?;
/// let bias = Tensor::new(&[[0f32, 0.0], [0.5, 0.5]], &Device::Cpu)?;
/// let normed = layer_norm(&x, &weight, &bias, &TableRows::each(vec![0, 1]), 0.0)?;
/// assert_eq!(normed.to_vec2::<f32>()?, [[-1.0, 1.0], [10.5, -9.5]]);
/// # Ok::<_, candle_core::Error>(())
/// ```
///
/// # Errors
/// Other shapes and types, and rows that the tables lack.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, rows: &TableRows, eps: f64) -> Result<Tensor> {
    rows.check(x, [weight, bias])?;
    if gpu::holds(x) {
        let tokens = x.dim(0)?;
        let wide = cast(x, DType::F32)?;
        let centred = wide.broadcast_sub(&wide.mean_keepdim(D::Minus1)?)?;
        let deviation = (centred.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
        let [weight, bias] = [weight, bias].map(|table| rows.spread(&cast(table, DType::F32)?, tokens));
        let normed = centred.broadcast_div(&deviation)?;
        return cast(&(normed * weight?)?.add(&bias?)?, x.dtype());
    }
    let inputs = [&x.contiguous()?, &weight.contiguous()?, &bias.contiguous()?];
    tape::apply(LayerNorm { rows: rows.clone(), eps }, inputs, Reads::Inputs)
}

/// `x + y * gate`: x and y `[T, C]`, f32 or bf16, with the row of `gate` `[M, C]` that `rows` names for each token. It is computed
/// in f32 and rounded once, to the type of x.
///
/// # Errors
/// Other shapes and types, and rows that the table lacks.
pub fn gated_residual(x: &Tensor, y: &Tensor, gate: &Tensor, rows: &TableRows) -> Result<Tensor> {
    if (x.shape(), x.dtype()) != (y.shape(), y.dtype()) {
        bail!("{:?} {:?} and {:?} {:?} have no sum", x.shape(), x.dtype(), y.shape(), y.dtype());
    }
    rows.check(x, [gate, gate])?;
    if gpu::holds(x) {
        let gate = rows.spread(&cast(gate, DType::F32)?, x.dim(0)?)?;
        return cast(&(cast(x, DType::F32)? + (cast(y, DType::F32)? * gate)?)?, x.dtype());
    }
    let inputs = [&x.contiguous()?, &y.contiguous()?, &gate.contiguous()?];
    tape::apply(GatedResidual { rows: rows.clone() }, inputs, Reads::Inputs)
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

/// Calls `work` with parts of the rows of x and out `[T, width]` on the threads of this rank; the range says which tokens they are.
fn by_parts<T: Number, R: Send>(
    x: &[T],
    out: &mut [T],
    width: usize,
    work: impl Fn(Range<usize>, &[T], &mut [T]) -> R + Sync + Send,
) -> Vec<R> {
    let width = width.max(1);
    let part = pool::part(x.len() / width, width);
    let parts = x.chunks(part * width).zip(out.chunks_mut(part * width)).enumerate().collect();
    pool::map(parts, |(index, (x, out)): (usize, (&[T], &mut [T]))| {
        let first = index * part;
        pool::vectorized(|| work(first..first + x.len() / width, x, out))
    })
}

struct LayerNorm {
    rows: TableRows,
    eps: f64,
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
            let mut out = vec![T::ZERO; x.len()];
            by_parts(x, &mut out, width, |tokens, x, out| self.forward(tokens, x, out, [w, b], width));
            T::to_cpu_storage_owned(out)
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

/// The sums of the parts' gradients of two tables, in the types of the tables.
fn table_gradients<const N: usize>(parts: Vec<[Vec<f32>; N]>, tables: [&Tensor; N]) -> Result<[Tensor; N]> {
    let mut sums = tables.map(|table| vec![0.0f32; table.elem_count()]);
    for part in parts {
        for (sum, part) in sums.iter_mut().zip(part) {
            sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
    }
    let mut gradients = tables.map(Tensor::clone);
    for ((gradient, sum), table) in gradients.iter_mut().zip(sums).zip(tables) {
        *gradient = cast(&Tensor::from_vec(sum, table.shape(), table.device())?, table.dtype())?;
    }
    Ok(gradients)
}

struct GatedResidual {
    rows: TableRows,
}

impl CustomOp3 for GatedResidual {
    fn name(&self) -> &'static str {
        "gated-residual"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_at: &Layout,
        y: &CpuStorage,
        y_at: &Layout,
        gate: &CpuStorage,
        gate_at: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let (gate, (_, width)) = (&*widened(gate, gate_at)?, x_at.shape().dims2()?);
        let out = with_number!(x.dtype(), T => {
            let mut out = elements::<T>(x, x_at)?.to_vec();
            by_parts(elements::<T>(y, y_at)?, &mut out, width, |tokens, y, out| {
                for ((token, y), out) in tokens.zip(y.chunks_exact(width)).zip(out.chunks_exact_mut(width)) {
                    let at = self.rows.of(token) * width;
                    for ((out, y), gate) in out.iter_mut().zip(y).zip(&gate[at..at + width]) {
                        *out = T::round_from(out.upcast() + y.upcast() * gate);
                    }
                }
            });
            T::to_cpu_storage_owned(out)
        });
        Ok((out, x_at.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        y: &Tensor,
        gate: &Tensor,
        _out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (d_out, width) = (d_out.contiguous()?, x.dim(1)?);
        let (dy, [d_gate]) = with_number!(y.dtype(), T => {
            let (dy, sums) = elements_of::<T, _>(y, |ys| {
                wide_values(gate, |gates| {
                    let mut dy = elements_of::<T, _>(&d_out, |d| Ok(d.to_vec()))?;
                    let sums = by_parts(ys, &mut dy, width, |tokens, y, dy| {
                        let mut sums = vec![0.0f32; gates.len()];
                        for ((token, y), dy) in tokens.zip(y.chunks_exact(width)).zip(dy.chunks_exact_mut(width)) {
                            let at = self.rows.of(token) * width;
                            for i in 0..width {
                                let d = dy[i].upcast();
                                sums[at + i] += d * y[i].upcast();
                                dy[i] = T::round_from(d * gates[at + i]);
                            }
                        }
                        [sums]
                    });
                    Ok((dy, sums))
                })
            })?;
            (Tensor::from_vec(dy, y.shape(), y.device())?, table_gradients(sums, [gate])?)
        });
        Ok((Some(d_out), Some(dy), Some(d_gate)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backward_from;
    use candle_core::{Device, Var};

    fn random(shape: (usize, usize)) -> Result<Var> {
        Var::from_tensor(&Tensor::randn(0f32, 1.0, shape, &Device::Cpu)?)
    }

    /// The largest distance, relative to the largest element of `wanted`.
    fn distance(got: &Tensor, wanted: &Tensor) -> Result<f32> {
        let most = wanted.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        Ok((got - wanted)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()? / most)
    }

    /// Both operations against candle's, on one thread and three, with one row for all tokens and with rows of their own.
    #[test]
    fn values_and_gradients_are_those_of_composed_operations() -> Result<()> {
        for (tokens, width, tables) in [(1, 1, 1), (5, 37, 1), (700, 48, 3)] {
            let rows = match tables {
                1 => TableRows::one(),
                _ => TableRows::each((0..tokens as u32).map(|token| token * 7 % tables as u32).collect()),
            };
            let (x, y, w, b) = (
                random((tokens, width))?,
                random((tokens, width))?,
                random((tables, width))?,
                random((tables, width))?,
            );
            let dy = Tensor::randn(0f32, 1.0, (tokens, width), &Device::Cpu)?;
            let [wide_w, wide_b] = [&w, &b].map(|table| rows.spread(table.as_tensor(), tokens));
            let (wide_w, wide_b) = (wide_w?, wide_b?);
            let centred = x.broadcast_sub(&x.mean_keepdim(1)?)?;
            let normed = centred.broadcast_div(&(centred.sqr()?.mean_keepdim(1)? + 1e-2)?.sqrt()?)?;
            let wanted = [((normed * &wide_w)? + wide_b)?, (x.as_tensor() + (y.as_tensor() * &wide_w)?)?];
            for threads in [1, 3] {
                let got = pool::run(threads, || {
                    let norm = layer_norm(x.as_tensor(), w.as_tensor(), b.as_tensor(), &rows, 1e-2)?;
                    Ok::<_, candle_core::Error>([norm, gated_residual(&x, &y, &w, &rows)?])
                })??;
                for (got, wanted) in got.iter().zip(&wanted) {
                    assert!(distance(got, wanted)? < 1e-5);
                    let (got, wanted) = (backward_from::backward(got, &dy)?, backward_from::backward(wanted, &dy)?);
                    for variable in [&x, &y, &w, &b] {
                        let of = |all: &candle_core::backprop::GradStore| all.get(variable.as_tensor()).cloned();
                        match (of(&got), of(&wanted)) {
                            (Some(got), Some(wanted)) => {
                                assert!((got - &wanted)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()? < 2e-4)
                            }
                            (got, wanted) => assert_eq!(got.is_some(), wanted.is_some()),
                        }
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn rows_that_a_table_lacks_are_refused() -> Result<()> {
        let (x, table) =
            (Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?, Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?);
        for rows in [vec![0, 2], vec![0], vec![0, 1, 1]] {
            let refused = gated_residual(&x, &x, &table, &TableRows::each(rows)).expect_err("no such rows");
            assert!(refused.to_string().contains("take rows up to"), "{refused}");
        }
        let none = Tensor::zeros((0, 3), DType::F32, &Device::Cpu)?;
        assert_eq!(layer_norm(&none, &table, &table, &TableRows::each(vec![]), 1e-6)?.dims(), [0, 3]);
        Ok(())
    }
}
