//! A column-parallel linear layer, whose outputs are distributed over the tensor-parallel ranks.

use super::ForwardPass;
use super::projection::Projection;
use crate::parameters::Scope;
use crate::shard::{ShardSpec, Split};
use candle_core::{Result, Tensor};

/// `x weight^T + bias`, where each rank has some rows of the weight (Shoeybi et al., 2019). It takes this rank's rows of x,
/// and returns all rows of this rank's outputs.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan::World;
/// use ringspan_candle::layers::{ColumnLinear, ForwardPass};
/// use ringspan_candle::shard::Split;
/// use ringspan_candle::model::{ModelBuilder, StoredWeights, Unit};
/// use ringspan_candle::{Adapters, ContextBuilder, TensorParallel};
/// # type Error = Box<dyn std::error::Error + Send + Sync>;
///
/// let builder = ModelBuilder::new();
/// let layer = ColumnLinear::new(&builder.unit(Unit::Layer(0), "layer"), 1, 2, false, Split::Even("ffn_dim"));
/// let y = World::threads(2)?.run(|rank| {
///     // Both ranks have the same token, and share the width of layers.
///     let alone = rank.communicator().split(rank.index(), 0)?;
///     let context = ContextBuilder::new(alone, rank.kernel()).batch(1, 2).build()?;
///     let context = context.with_tensor_parallel(TensorParallel::new(rank.communicator().clone()));
///     let weight = Tensor::new(&[[[10f32], [100.0]][rank.index()]], &Device::Cpu)?;                     // this rank's row
///     let x = Tensor::new(&[[[1f32], [2.0]][rank.index()]], &Device::Cpu)?;                             // this rank's token
///     let (weights, adapters) = (StoredWeights::from([("layer.weight".into(), weight.into())]), Adapters::none());
///     let y = layer.forward(&x, &ForwardPass::new(&weights, &context, &adapters))?;                     // all tokens
///     Ok::<_, Error>(y.to_vec2::<f32>()?)
/// })?;
/// assert_eq!(y, [[[10.0], [20.0]], [[100.0], [200.0]]]);
/// # Ok::<_, Error>(())
/// ```
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
