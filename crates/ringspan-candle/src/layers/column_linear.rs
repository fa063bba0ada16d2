//! A linear layer whose outputs are dealt to the ranks that share it.

use super::ForwardPass;
use super::projection::Projection;
use crate::model::Scope;
use crate::shard::{ShardSpec, Split};
use candle_core::{Result, Tensor};

/// `x weight^T + bias` where each rank has some rows of the weight (Shoeybi et al., 2019): this rank's rows of x in, all rows
/// of this rank's outputs out.
#[derive(Debug, Clone)]
pub struct ColumnLinear(Projection);

impl ColumnLinear {
    /// Adds weight `[outputs, inputs]` and, if there is one, bias `[outputs]`; `split` deals the outputs.
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
