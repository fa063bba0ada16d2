//! Root mean square normalisation of queries or keys over all heads at once.

use super::ForwardPass;
use crate::cast::cast;
use crate::norm::rms_norm;
use crate::parameters::{Init, Scope};
use crate::shard::{HeadCounts, ShardSpec, Split};
use candle_core::{D, DType, Result, Tensor};

/// `x / rms(x) * weight`, where the root mean square is over all heads of a token, on whichever ranks they are.
#[derive(Debug, Clone)]
pub struct AllHeadsNorm {
    weight: String,
    eps: f64,
    /// The width of all heads together.
    width: usize,
    heads: HeadCounts,
    of_keys: bool,
}

impl AllHeadsNorm {
    /// Adds the weight `[H * head_dim]` of a norm of queries.
    #[must_use]
    pub fn of_queries(scope: &Scope, heads: HeadCounts, head_dim: usize, eps: f64) -> Self {
        let width = heads.queries * head_dim;
        let shard = ShardSpec::Rows(Split::QueryHeads(heads, head_dim));
        let weight = scope.parameter("weight", &[width], shard, Init::Constant(1.0));
        Self { weight, eps, width, heads, of_keys: false }
    }

    /// Adds the weight `[G * head_dim]` of a norm of keys.
    #[must_use]
    pub fn of_keys(scope: &Scope, heads: HeadCounts, head_dim: usize, eps: f64) -> Self {
        let width = heads.key_values * head_dim;
        let shard = ShardSpec::Rows(Split::KeyValueHeads(heads, head_dim));
        let weight = scope.parameter("weight", &[width], shard, Init::Constant(1.0));
        Self { weight, eps, width, heads, of_keys: true }
    }

    /// The norm of x `[T, heads of this rank, D]`.
    ///
    /// # Errors
    /// A missing weight, other shapes, failures of other ranks.
    pub fn forward(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        if x.dim(0)? == 0 {
            return Ok(x.clone());
        }
        let (weight, flat) = (pass.tensor(&self.weight)?, x.flatten_from(1)?);
        let tp = pass.attend().tensor_parallel();
        if tp.is_single_rank() {
            return rms_norm(&flat, weight, self.eps)?.reshape(x.shape());
        }
        let wide = cast(&flat, DType::F32)?;
        let squares = (wide.sqr()?.sum_keepdim(D::Minus1)? / self.copies(tp.rank_and_size())? as f64)?;
        // Sums the squares over the ranks, with the result on each of them.
        let squares = pass.gather(&pass.reduce(&squares)?)?;
        let scale = ((squares / self.width as f64)? + self.eps)?.sqrt()?.recip()?;
        let normed = wide.broadcast_mul(&scale)?.broadcast_mul(&cast(weight, DType::F32)?)?;
        cast(&normed, x.dtype())?.reshape(x.shape())
    }

    /// The number of ranks that have the same heads as this one: there may be fewer key-value heads than ranks.
    fn copies(&self, (rank, ranks): (usize, usize)) -> Result<usize> {
        if !self.of_keys || ranks <= self.heads.key_values {
            return Ok(1);
        }
        let of = |rank| self.heads.of_rank((rank, ranks)).map_err(candle_core::Error::wrap);
        let own = of(rank)?.key_values;
        let all = (0..ranks).map(of).collect::<Result<Vec<_>>>()?;
        Ok(all.iter().filter(|heads| heads.key_values == own).count())
    }
}
