//! A row-parallel linear layer, whose inputs are distributed over the tensor-parallel ranks.

use super::ForwardPass;
use super::projection::Projection;
use super::with_bias;
use crate::parameters::Scope;
use crate::shard::{HeadCounts, ShardSpec, Split};
use candle_core::{Result, Tensor};

/// `x weight^T + bias`, where each rank has some columns of the weight (Shoeybi et al., 2019). It takes all rows of this
/// rank's inputs, and returns this rank's rows of the sum over ranks.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan::World;
/// use ringspan_candle::layers::{ForwardPass, RowLinear};
/// use ringspan_candle::shard::Split;
/// use ringspan_candle::model::{ModelBuilder, StoredWeights, Unit};
/// use ringspan_candle::{Adapters, ContextBuilder, TensorParallel};
/// # type Error = Box<dyn std::error::Error + Send + Sync>;
///
/// let builder = ModelBuilder::new();
/// let layer = RowLinear::new(&builder.unit(Unit::Layer(0), "layer"), 2, 1, false, Split::Even("ffn_dim"));
/// let y = World::threads(2)?.run(|rank| {
///     // Both ranks have the same token, and share the width of layers.
///     let alone = rank.communicator().split(rank.index(), 0)?;
///     let context = ContextBuilder::new(alone, rank.kernel()).batch(1, 2).build()?;
///     let context = context.with_tensor_parallel(TensorParallel::new(rank.communicator().clone()));
///     let weight = Tensor::new(&[[[10f32, 100.0][rank.index()]]], &Device::Cpu)?;                       // this rank's column
///     let x = Tensor::new(&[[1f32], [2.0]], &Device::Cpu)?;                                             // all tokens
///     let (weights, adapters) = (StoredWeights::from([("layer.weight".into(), weight.into())]), Adapters::none());
///     let y = layer.forward(&x, &ForwardPass::new(&weights, &context, &adapters))?;                     // this rank's token
///     Ok::<_, Error>(y.to_vec2::<f32>()?)
/// })?;
/// assert_eq!(y, [[[110.0]], [[220.0]]]);
/// # Ok::<_, Error>(())
/// ```
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
