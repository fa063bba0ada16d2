//! A linear layer that every rank holds whole.

use super::ForwardPass;
use super::projection::Projection;
use crate::parameters::Scope;
use crate::shard::ShardSpec;
use candle_core::{Result, Tensor};

/// `x weight^T + bias` for this rank's rows, with the whole layer on each rank of a tensor-parallel group: for outputs so
/// narrow that sharding them would save less time than sending them to other ranks takes.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan::World;
/// use ringspan_candle::layers::{ForwardPass, ReplicatedLinear};
/// use ringspan_candle::model::{ModelBuilder, StoredWeights, Unit};
/// use ringspan_candle::{Adapters, Context};
/// # type Error = Box<dyn std::error::Error + Send + Sync>;
///
/// let builder = ModelBuilder::new();
/// let layer = ReplicatedLinear::new(&builder.unit(Unit::Layer(0), "gate"), 2, 1, true);
/// let bias = Tensor::new(&[0.5f32], &Device::Cpu)?;
/// let weight = Tensor::new(&[[1f32, 2.0]], &Device::Cpu)?;
/// let weights = StoredWeights::from([("gate.weight".into(), weight.into()), ("gate.bias".into(), bias.into())]);
/// let y = World::threads(1)?.run(|rank| {
///     let (context, adapters) = (Context::builder(rank).batch(1, 1).build()?, Adapters::none());
///     let x = Tensor::new(&[[3f32, 4.0]], &Device::Cpu)?;
///     let y = layer.forward(&x, &ForwardPass::new(&weights, &context, &adapters))?;
///     Ok::<_, Error>(y.to_vec2::<f32>()?)
/// })?;
/// assert_eq!(y[0], [[11.5]]);
/// # Ok::<_, Error>(())
/// ```
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
