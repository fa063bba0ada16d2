//! A linear layer that every rank holds whole.

use super::ForwardPass;
use super::projection::Projection;
use crate::parameters::Scope;
use crate::shard::ShardSpec;
use candle_core::{Result, Tensor};

/// `x weight^T + bias` for this rank's rows, with the whole layer on each rank of a tensor-parallel group: for outputs so
/// narrow that sharding them would save less time than sending them to other ranks takes.
#[derive(Debug, Clone)]
pub struct ReplicatedLinear(Projection);

impl ReplicatedLinear {
    /// Adds a weight `[outputs, inputs]` and, if asked for, a bias `[outputs]`.
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
