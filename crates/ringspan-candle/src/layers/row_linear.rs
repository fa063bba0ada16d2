//! A row-parallel linear layer, whose inputs are distributed over the tensor-parallel ranks.

use super::ForwardPass;
use super::projection::Projection;
use super::with_bias;
use crate::parameters::Scope;
use crate::shard::{HeadCounts, ShardSpec, Split};
use candle_core::{Result, Tensor};

/// `x weight^T + bias`, where each rank has some columns of the weight (Shoeybi et al., 2019). It takes all rows of this
/// rank's inputs, and returns this rank's rows of the sum over ranks.
#[derive(Debug, Clone)]
pub struct RowLinear(Projection);

impl RowLinear {
    /// Adds a weight `[outputs, inputs]` and, if asked for, a bias `[outputs]`; `split` says how the inputs are distributed.
    #[must_use]
    pub fn new(scope: &Scope, inputs: usize, outputs: usize, bias: bool, split: Split) -> Self {
        Self(Projection::new(scope, [outputs, inputs], bias, ShardSpec::Columns(split)))
    }

    /// Like [`new`](Self::new), for inputs that are heads of this width: attention's output projection.
    #[must_use]
    pub fn from_heads(scope: &Scope, heads: HeadCounts, head_dim: usize, outputs: usize, bias: bool) -> Self {
        Self::new(scope, heads.queries * head_dim, outputs, bias, Split::QueryHeads(heads, head_dim))
    }

    /// x `[T, this rank's inputs]` to `[rows, outputs]`.
    ///
    /// # Errors
    /// Missing parameters, failures of other ranks.
    pub fn forward(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        reduced(&self.0, x, true, pass)
    }
}

/// The sum of a projection over the ranks that share its inputs, to which the bias is added once; `needs_values` is as in
/// [`Projection::product`].
pub(super) fn reduced(projection: &Projection, x: &Tensor, needs_values: bool, pass: &ForwardPass) -> Result<Tensor> {
    let bias = projection.bias(pass)?;
    if pass.attend().tensor_parallel().is_single_rank() {
        return projection.product(x, bias, needs_values, pass);
    }
    let sum = pass.reduce(&projection.product(x, None, needs_values, pass)?)?;
    match bias.filter(|_| pass.tokens() > 0) {
        Some(bias) => with_bias(&sum, bias),
        None => Ok(sum),
    }
}
