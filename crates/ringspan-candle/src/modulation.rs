//! Layer normalisation and residual sums whose factors depend on the token (adaptive layer norm; Peebles and Xie, 2022,
//! arXiv:2212.09748), each as one operation with a backward pass.
//!
//! Factors are tables `[M, C]`, one row for each condition (a time step of a diffusion, a batch row), and [`TableRows`] says which
//! row a token takes. So factors of many tokens with few conditions are never spread over the tokens.
//!
//! Shape letters: T tokens of this rank, C width, M rows of a table.

mod gated_residual;
mod layer_norm;
mod tables;

use crate::cast::cast;
use crate::gpu;
use crate::tape::{self, Reads};
use candle_core::{D, DType, Result, Tensor, bail};
use gated_residual::GatedResidual;
use layer_norm::LayerNorm;
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

    /// Checks that these tables have a row for every token of x `[T, C]`.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{backward_from, pool};
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
