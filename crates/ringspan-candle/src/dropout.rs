//! Dropout of a layer's inputs in training (Srivastava et al., 2014), the same on every mesh.

use crate::slices::widened;
use crate::tape::{self, Reads};
use crate::{gpu, number, pool};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, bail};
use ringspan::kernel::Dropout;
use std::sync::Arc;

/// What is dropped in a pass of training.
///
/// Whether a number is dropped follows from seed, layer, token and column alone, by the generator that drops attention
/// weights. So each mesh drops the same, and a layer that is computed again drops what it dropped before.
#[derive(Debug, Clone)]
pub struct Drops {
    seed: u64,
    tokens: Arc<[usize]>,
    /// The number of the first token of the batch whose rows attention sees.
    first_of_batch: usize,
}

impl Drops {
    /// Drops by `seed`, another one each step, where `tokens` are the numbers of the tokens at hand among all those of the
    /// step: a position in a document is not enough, since many documents have it.
    pub fn new(seed: u64, tokens: Vec<usize>) -> Self {
        Self { seed, tokens: tokens.into(), first_of_batch: 0 }
    }

    /// The same, where the batch in whose flat rows attention counts its queries begins with the token of this number: the
    /// ranks of a mesh may see some of the rows of a step. All ranks of an attention must say the same.
    #[must_use]
    pub fn in_batch_from(self, first_of_batch: usize) -> Self {
        Self { first_of_batch, ..self }
    }

    /// The same for some of the tokens, by their rows here, in this order.
    ///
    /// # Panics
    /// Rows that are not here.
    #[must_use]
    pub fn of_rows(&self, rows: &[u32]) -> Self {
        self.of(rows.iter().map(|row| self.tokens[*row as usize]).collect())
    }

    /// The same for other tokens, by their numbers among all those of the step.
    #[must_use]
    pub fn of(&self, tokens: Vec<usize>) -> Self {
        Self { tokens: tokens.into(), ..self.clone() }
    }

    /// The numbers of the tokens at hand among all those of the step.
    #[must_use]
    pub fn tokens(&self) -> &[usize] {
        &self.tokens
    }

    /// What is dropped of attention's weights, a share of `rate` in 0..1, in layer number `layer`, of which `first_head` is the
    /// first head here.
    #[must_use]
    pub fn of_attention(&self, rate: f64, layer: u64, first_head: usize) -> Dropout {
        let seed = self.seed.wrapping_add(layer);
        Dropout { rate: rate as f32, seed, first_head, first_query: self.first_of_batch }
    }

    /// `x` `[T, in]`, the input of layer number `layer`, of which `first` is the first column here: a share of `rate` in
    /// 0..1 becomes 0, and the rest grows by `1 / (1 - rate)`. Differentiable.
    ///
    /// # Errors
    /// Another number of rows than tokens at hand.
    pub fn apply(&self, x: &Tensor, rate: f64, layer: usize, first: usize) -> Result<Tensor> {
        let rows = x.dim(0)?;
        if rows != self.tokens.len() {
            bail!("{rows} rows are to be dropped from, but {} tokens are at hand", self.tokens.len());
        }
        let dropout = Dropout { rate: rate as f32, seed: self.seed, first_head: 0, first_query: 0 };
        let op = DropInputs { dropout, layer, first, tokens: self.tokens.clone() };
        if gpu::holds(x) {
            // The generator is the CPU's.
            let factors = Tensor::ones(x.shape(), DType::F32, &Device::Cpu)?.apply_op1_no_bwd(&op)?;
            return gpu::masked(x, factors.to_device(x.device())?);
        }
        tape::apply(op, [&x.contiguous()?], Reads::Nothing)
    }
}

/// Its own backward: what was dropped has no gradient, and the gradient of the rest grows as it did.
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
            pool::vectorized(|| self.dropout.drop_rows(self.layer, tokens, self.first..self.first + width, rows));
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

    /// The factors of `[tokens, columns]`, one by one.
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

    /// A low-rank adapter behind it, against candle's own operations and a mask.
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
                let dropped = Drops::new(3, tokens.clone()).apply(x.as_tensor(), 0.4, 11, 2)?;
                linear(&linear(&dropped, &a, None)?, &b, None)?
            };
            let gradients = crate::cotangent::backward(&y, &dy)?;
            let of = |v: &Var| gradients.get(v.as_tensor()).map_or(Ok(Vec::new()), |d| d.flatten_all()?.to_vec1());
            Ok(vec![y.flatten_all()?.to_vec1()?, of(&x)?, of(&a)?, of(&b)?])
        };
        for (got, wanted) in run(false)?.into_iter().zip(run(true)?) {
            assert_eq!(got.len(), wanted.len());
            assert!(got.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-6), "{got:?} is not {wanted:?}");
        }
        Ok(())
    }

    /// Over seeds the mean stays, tokens at the same place of a row are dropped apart, and so are layers.
    #[test]
    fn the_mean_over_seeds_is_the_input_and_no_two_tokens_or_layers_agree() -> Result<()> {
        let (rows, width, seeds) = (8, 16, 4000);
        let x = wave((rows, width), 0.3)?;
        let mut sum = x.zeros_like()?;
        for seed in 0..seeds {
            sum = (sum + Drops::new(seed, (0..rows).collect()).apply(&x, 0.2, 1, 0)?)?;
        }
        let mean = (sum / seeds as f64)?;
        let most = (mean - &x)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        // A number deviates by a half of itself, its mean by a 126th.
        assert!(most < 5.0 * 0.5 / (seeds as f32).sqrt(), "{most}");

        let ones = x.ones_like()?;
        let mask = |seed, layer, first: usize| -> Result<Vec<f32>> {
            let tokens = (first..first + rows).collect();
            Drops::new(seed, tokens).apply(&ones, 0.5, layer, 0)?.flatten_all()?.to_vec1()
        };
        let one = mask(1, 1, 0)?;
        for other in [mask(2, 1, 0)?, mask(1, 2, 0)?, mask(1, 1, rows)?] {
            let same = one.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!((40..90).contains(&same), "{same} of {} agree", one.len());
        }
        assert!(Drops::new(1, vec![0; 3]).apply(&x, 0.5, 0, 0).is_err());
        assert_eq!(Drops::new(1, vec![]).apply(&x.narrow(0, 0, 0)?, 0.5, 0, 0)?.dims(), [0, width]);
        Ok(())
    }
}
