//! Dropout of a layer's inputs in training (Srivastava et al., 2014), with the same result on every mesh.

use crate::device_ops;
use crate::slices::widened;
use crate::tape::{self, Reads};
use crate::{gpu, number, pool};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, bail};
use ringspan::kernel::Dropout;
use std::sync::Arc;

/// Decides which elements are dropped in one forward pass.
///
/// Whether an element is dropped follows from seed, layer, token and column alone, by the random generator that also drops
/// attention weights. So every mesh drops the same elements, and a recomputed layer drops what it dropped before.
#[derive(Debug, Clone)]
pub struct InputDropout {
    seed: u64,
    tokens: Arc<[usize]>,
    /// The number, among all tokens of the step, of the first token of the batch that attention sees.
    first_of_batch: usize,
}

impl InputDropout {
    /// Dropout with `seed`, which should differ in each step. `tokens` are the numbers of this rank's tokens among all tokens
    /// of the step: positions in documents would not do, since tokens of many documents share one.
    pub fn new(seed: u64, tokens: Vec<usize>) -> Self {
        Self { seed, tokens: tokens.into(), first_of_batch: 0 }
    }

    /// Sets the first token of the batch in whose flat rows attention counts its queries, by its number among all tokens of
    /// the step: a group of ranks may see only some rows of a step. All ranks of an attention must pass the same number.
    #[must_use]
    pub fn in_batch_from(self, first_of_batch: usize) -> Self {
        Self { first_of_batch, ..self }
    }

    /// The same dropout for some of the tokens, given by their rows on this rank, in this order.
    ///
    /// # Panics
    /// If a row is out of range.
    #[must_use]
    pub fn of_rows(&self, rows: &[u32]) -> Self {
        self.of(rows.iter().map(|row| self.tokens[*row as usize]).collect())
    }

    /// The same dropout for other tokens, given by their numbers among all tokens of the step.
    #[must_use]
    pub fn of(&self, tokens: Vec<usize>) -> Self {
        Self { tokens: tokens.into(), ..self.clone() }
    }

    /// The numbers of this rank's tokens among all tokens of the step.
    #[must_use]
    pub fn tokens(&self) -> &[usize] {
        &self.tokens
    }

    /// The dropout of attention weights in layer number `layer`, for a share of `rate` in 0..1; `first_head` is the first
    /// query head on this rank.
    #[must_use]
    pub fn of_attention(&self, rate: f64, layer: u64, first_head: usize) -> Dropout {
        let seed = self.seed.wrapping_add(layer);
        Dropout { rate: rate as f32, seed, first_head, first_query: self.first_of_batch }
    }

    /// Drops from `x` `[T, in]`, the input of layer number `layer`, whose first column on this rank is column `first` of the
    /// whole input: a share of `rate` in 0..1 of the elements becomes 0, and the rest is multiplied by `1 / (1 - rate)`.
    /// Differentiable.
    ///
    /// # Errors
    /// A number of rows that differs from the number of tokens.
    pub fn apply(&self, x: &Tensor, rate: f64, layer: usize, first: usize) -> Result<Tensor> {
        let rows = x.dim(0)?;
        if rows != self.tokens.len() {
            bail!("{rows} rows are to be dropped from, but {} tokens are at hand", self.tokens.len());
        }
        let dropout = Dropout { rate: rate as f32, seed: self.seed, first_head: 0, first_query: 0 };
        let op = DropInputs { dropout, layer, first, tokens: self.tokens.clone() };
        if gpu::holds(x) {
            // The generator runs on the CPU alone.
            let factors = Tensor::ones(x.shape(), DType::F32, &Device::Cpu)?.apply_op1_no_bwd(&op)?;
            return device_ops::masked(x, factors.to_device(x.device())?);
        }
        tape::apply(op, [&x.contiguous()?], Reads::Nothing)
    }
}

/// The operation is its own backward pass: gradients are dropped and scaled where inputs were.
#[derive(Clone)]
struct DropInputs {
    dropout: Dropout,
    layer: usize,
    first: usize,
    tokens: Arc<[usize]>,
}

impl CustomOp1 for DropInputs {
    fn name(&self) -> &'static str {
        "drop"
    }

    fn cpu_fwd(&self, x: &CpuStorage, at: &Layout) -> Result<(CpuStorage, Shape)> {
        let mut out = widened(x, at)?.into_owned();
        let width = at.dims().last().copied().unwrap_or(0).max(1);
        let part = pool::part(self.tokens.len(), width);
        let parts = out.chunks_mut(part * width).zip(self.tokens.chunks(part)).collect();
        pool::map(parts, |(rows, tokens): (&mut [f32], &[usize])| {
            pool::vectorized(
                #[inline(always)]
                || self.dropout.drop_rows(self.layer, tokens, self.first..self.first + width, rows),
            );
        });
        Ok((number::storage(out, x.dtype())?, at.shape().clone()))
    }

    fn bwd(&self, _x: &Tensor, _out: &Tensor, d_out: &Tensor) -> Result<Option<Tensor>> {
        d_out.contiguous()?.apply_op1_no_bwd(self).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::linear;
    use candle_core::{Device, Var};

    fn wave(shape: (usize, usize), pace: f32) -> Result<Tensor> {
        let values: Vec<f32> = (0..shape.0 * shape.1).map(|i| (i as f32 * pace).sin()).collect();
        Tensor::from_vec(values, shape, &Device::Cpu)
    }

    /// The factors of the elements `[tokens, columns]`, computed one by one.
    fn factors(
        seed: u64,
        rate: f64,
        layer: usize,
        tokens: &[usize],
        columns: std::ops::Range<usize>,
    ) -> Result<Tensor> {
        let dropout = Dropout { rate: rate as f32, seed, first_head: 0, first_query: 0 };
        let factor = |token, column| if dropout.keeps(layer, token, column) { 1.0 / (1.0 - rate as f32) } else { 0.0 };
        let all: Vec<f32> =
            tokens.iter().flat_map(|token| columns.clone().map(move |column| factor(*token, column))).collect();
        Tensor::from_vec(all, (tokens.len(), columns.len()), &Device::Cpu)
    }

    /// Compares a low-rank adapter after the dropout with candle's own operations and a mask.
    #[test]
    fn results_and_gradients_are_those_of_a_mask() -> Result<()> {
        let tokens = vec![5, 0, 900_000_000_000, 7];
        let [x, a, b] = [wave((4, 6), 0.7)?, wave((3, 6), 1.1)?, wave((5, 3), 0.4)?];
        let dy = wave((4, 5), 0.9)?;
        let run = |composed: bool| -> Result<Vec<Vec<f32>>> {
            let [x, a, b] = [&x, &a, &b].map(Var::from_tensor);
            let (x, a, b) = (x?, a?, b?);
            let y = if composed {
                let dropped = (x.as_tensor() * factors(3, 0.4, 11, &tokens, 2..8)?)?;
                dropped.matmul(&a.t()?)?.matmul(&b.t()?)?
            } else {
                let dropped = InputDropout::new(3, tokens.clone()).apply(x.as_tensor(), 0.4, 11, 2)?;
                linear(&linear(&dropped, &a, None)?, &b, None)?
            };
            let gradients = crate::backward_from::backward(&y, &dy)?;
            let of = |v: &Var| gradients.get(v.as_tensor()).map_or(Ok(Vec::new()), |d| d.flatten_all()?.to_vec1());
            Ok(vec![y.flatten_all()?.to_vec1()?, of(&x)?, of(&a)?, of(&b)?])
        };
        for (got, wanted) in run(false)?.into_iter().zip(run(true)?) {
            assert_eq!(got.len(), wanted.len());
            assert!(got.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-6), "{got:?} is not {wanted:?}");
        }
        Ok(())
    }

    /// The mean over seeds is the input, and masks of different seeds, tokens and layers differ.
    #[test]
    fn the_mean_over_seeds_is_the_input_and_no_two_tokens_or_layers_agree() -> Result<()> {
        let (rows, width, seeds) = (8, 16, 4000);
        let x = wave((rows, width), 0.3)?;
        let mut sum = x.zeros_like()?;
        for seed in 0..seeds {
            sum = (sum + InputDropout::new(seed, (0..rows).collect()).apply(&x, 0.2, 1, 0)?)?;
        }
        let mean = (sum / seeds as f64)?;
        let most = (mean - &x)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        // One result deviates by half of the input (standard deviation), so the mean of 4000 deviates by a 126th of it.
        assert!(most < 5.0 * 0.5 / (seeds as f32).sqrt(), "{most}");

        let ones = x.ones_like()?;
        let mask = |seed, layer, first: usize| -> Result<Vec<f32>> {
            let tokens = (first..first + rows).collect();
            InputDropout::new(seed, tokens).apply(&ones, 0.5, layer, 0)?.flatten_all()?.to_vec1()
        };
        let one = mask(1, 1, 0)?;
        for other in [mask(2, 1, 0)?, mask(1, 2, 0)?, mask(1, 1, rows)?] {
            let same = one.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!((40..90).contains(&same), "{same} of {} agree", one.len());
        }
        assert!(InputDropout::new(1, vec![0; 3]).apply(&x, 0.5, 0, 0).is_err());
        assert_eq!(InputDropout::new(1, vec![]).apply(&x.narrow(0, 0, 0)?, 0.5, 0, 0)?.dims(), [0, width]);
        Ok(())
    }
}
