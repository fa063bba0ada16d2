//! Layer normalisation as a layer.

use super::ForwardPass;
use crate::modulation::{TableRows, layer_norm};
use crate::parameters::{Init, Scope};
use crate::shard::ShardSpec;
use candle_core::{Result, Tensor};

/// `(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension (Ba et al., 2016).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan::World;
/// use ringspan_candle::layers::{ForwardPass, LayerNorm};
/// use ringspan_candle::model::{ModelBuilder, StoredWeights, Unit};
/// use ringspan_candle::{Adapters, Context};
/// # type Error = Box<dyn std::error::Error + Send + Sync>;
///
/// let builder = ModelBuilder::new();
/// let norm = LayerNorm::new(&builder.unit(Unit::Head, "norm"), 2, 0.0);
/// let of = |numbers: [f32; 2]| Tensor::new(&numbers, &Device::Cpu);
/// let weights = StoredWeights::from([
///     ("norm.weight".into(), of([1.0, 2.0])?.into()),
///     ("norm.bias".into(), of([0.0, 1.0])?.into()),
/// ]);
/// let y = World::threads(1)?.run(|rank| {
///     let (context, adapters) = (Context::builder(rank).batch(1, 1).build()?, Adapters::none());
///     let x = Tensor::new(&[[3f32, 7.0]], &Device::Cpu)?;
///     let y = norm.forward(&x, &ForwardPass::new(&weights, &context, &adapters))?;
///     Ok::<_, Error>(y.to_vec2::<f32>()?)
/// })?;
/// assert_eq!(y[0], [[-1.0, 3.0]]);
/// # Ok::<_, Error>(())
/// ```
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
