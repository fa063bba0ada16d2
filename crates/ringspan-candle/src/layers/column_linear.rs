//! A column-parallel linear layer, whose outputs are distributed over the tensor-parallel ranks.

use super::ForwardPass;
use super::projection::Projection;
use crate::parameters::Scope;
use crate::shard::{ShardSpec, Split};
use candle_core::{Result, Tensor};

/// `x weight^T + bias`, where each rank has some rows of the weight (Shoeybi et al., 2019). It takes this rank's rows of x,
/// and returns all rows of this rank's outputs.
#[derive(Debug, Clone)]
pub struct ColumnLinear(Projection);

impl ColumnLinear {
    /// Adds a weight `[outputs, inputs]` and, if asked for, a bias `[outputs]`; `split` says how the outputs are distributed.
    #[must_use]
    pub fn new(scope: &Scope, inputs: usize, outputs: usize, bias: bool, split: Split) -> Self {
        Self(Projection::new(scope, [outputs, inputs], bias, ShardSpec::Rows(split)))
    }

    /// x `[rows, inputs]` to `[T, this rank's outputs]`.
    ///
    /// # Errors
    /// Missing parameters, failures of other ranks.
    pub fn forward(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        self.0.forward(&pass.gather(x)?, pass)
    }
}
