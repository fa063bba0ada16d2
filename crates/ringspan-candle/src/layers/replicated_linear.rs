//! A linear layer that every rank holds whole.

use super::ForwardPass;
use super::projection::Projection;
use crate::model::Scope;
use crate::shard::ShardSpec;
use candle_core::{Result, Tensor};

/// `x weight^T + bias` of this rank's rows, where ranks share layers: for outputs so narrow that dealing them would save less
/// than their way to other ranks costs.
#[derive(Debug, Clone)]
pub struct ReplicatedLinear(Projection);

impl ReplicatedLinear {
    /// Adds weight `[outputs, inputs]` and, if there is one, bias `[outputs]`.
    #[must_use]
    pub fn new(scope: &Scope, inputs: usize, outputs: usize, bias: bool) -> Self {
        Self(Projection::new(scope, [outputs, inputs], bias, ShardSpec::Replicated))
    }

    /// x `[rows, inputs]` to `[rows, outputs]`.
    ///
    /// # Errors
    /// Missing parameters.
    pub fn forward(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        self.0.forward(x, pass)
    }
}
