//! Layer normalisation as a layer.

use super::ForwardPass;
use crate::modulation::{TableRows, layer_norm};
use crate::parameters::{Init, Scope};
use crate::shard::ShardSpec;
use candle_core::{Result, Tensor};

/// `(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension (Ba et al., 2016).
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: String,
    bias: String,
    eps: f64,
}

impl LayerNorm {
    /// Adds a weight and a bias `[width]`.
    #[must_use]
    pub fn new(scope: &Scope, width: usize, eps: f64) -> Self {
        let parameter = |name, init| scope.parameter(name, &[width], ShardSpec::Replicated, Init::Constant(init));
        Self { weight: parameter("weight", 1.0), bias: parameter("bias", 0.0), eps }
    }

    /// The norm of x `[T, width]`.
    ///
    /// # Errors
    /// Missing parameters, other shapes.
    pub fn forward(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let (weight, bias) = (pass.tensor(&self.weight)?.unsqueeze(0)?, pass.tensor(&self.bias)?.unsqueeze(0)?);
        layer_norm(x, &weight, &bias, &TableRows::one(), self.eps)
    }
}
