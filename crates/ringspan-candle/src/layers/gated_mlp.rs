//! The gated feed-forward layer (gated MLP).

use super::ForwardPass;
use super::projection::{LinearWithWeights, Projection};
use super::row_linear::reduced;
use super::with_bias;
use crate::activation::Activation;
use crate::adapter_rows::AdapterRows;
use crate::gated_mlp::gated_mlp;
use crate::gpu;
use crate::parameters::Scope;
use crate::residual::{residual, residual_unused};
use crate::shard::{ShardSpec, Split, Stack};
use crate::swiglu::gated;
use crate::tiled::{RowFunction, tiled};
use crate::weight::Weight;
use candle_core::{Result, Tensor, bail};
use std::ops::Range;

/// `down_proj(act(gate_proj(x)) * up_proj(x))` (Shazeer, 2020); with tensor parallelism, its inner width is sharded.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan::World;
/// use ringspan_candle::activation::Activation;
/// use ringspan_candle::layers::{ForwardPass, GatedMlp};
/// use ringspan_candle::model::{ModelBuilder, StoredWeights, Unit};
/// use ringspan_candle::{Adapters, Context};
/// # type Error = Box<dyn std::error::Error + Send + Sync>;
///
/// let builder = ModelBuilder::new();
/// let mlp = GatedMlp::new(&builder.unit(Unit::Layer(0), "mlp"), 1, 1, false, Activation::Silu);
/// let weight = |name: &str, x: f32| Ok::<_, Error>((format!("mlp.{name}.weight"), Tensor::new(&[[x]], &Device::Cpu)?.into()));
/// let weights = StoredWeights::from([weight("gate_proj", 1.0)?, weight("up_proj", 2.0)?, weight("down_proj", 3.0)?]);
/// let y = World::threads(1)?.run(|rank| {
///     let (context, adapters) = (Context::builder(rank).batch(1, 1).build()?, Adapters::none());
///     let x = Tensor::new(&[[4f32]], &Device::Cpu)?;
///     let y = mlp.forward(&x, &ForwardPass::new(&weights, &context, &adapters))?;
///     Ok::<_, Error>(y.to_vec2::<f32>()?)
/// })?;
/// let silu = 4.0 / (1.0 + (-4f32).exp());
/// assert!((y[0][0][0] - silu * 8.0 * 3.0).abs() < 1e-4);
/// # Ok::<_, Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct GatedMlp {
    name: String,
    inner: Inner,
    down: Projection,
    activation: Activation,
}

/// The projections to the inner width.
#[derive(Debug, Clone)]
enum Inner {
    /// Gate and up in matrices of their own.
    Separate([Projection; 2]),
    /// Gate and up in one matrix, the rows of gate first.
    Stacked(Projection),
}

const SPLIT: Split = Split::Even("intermediate_size");

impl GatedMlp {
    /// Adds `gate_proj`, `up_proj` and `down_proj` in `scope`; all have biases or none has.
    #[must_use]
    pub fn new(scope: &Scope, hidden: usize, width: usize, bias: bool, activation: Activation) -> Self {
        let wide = |name| Projection::new(&scope.at(name), [width, hidden], bias, ShardSpec::Rows(SPLIT));
        let inner = Inner::Separate([wide("gate_proj"), wide("up_proj")]);
        let down = Projection::new(&scope.at("down_proj"), [hidden, width], bias, ShardSpec::Columns(SPLIT));
        Self { name: scope.name().into(), inner, down, activation }
    }

    /// Adds `gate_up_proj`, with the rows of gate before those of up, and `down_proj` in `scope`, without biases.
    #[must_use]
    pub fn stacked(scope: &Scope, hidden: usize, width: usize, activation: Activation) -> Self {
        let stack = Stack::new([(width, SPLIT), (width, SPLIT)]);
        let both = Projection::new(&scope.at("gate_up_proj"), [2 * width, hidden], false, ShardSpec::Stacked(stack));
        let down = Projection::new(&scope.at("down_proj"), [hidden, width], false, ShardSpec::Columns(SPLIT));
        Self { name: scope.name().into(), inner: Inner::Stacked(both), down, activation }
    }

    /// x `[rows, C]` to `[rows, C]`.
    ///
    /// # Errors
    /// Missing parameters, failures of other ranks.
    pub fn forward(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        self.output(x, true, pass)
    }

    /// Adds the output of the layer for x to the residual stream, `[rows, C]` each. When the layer is recomputed for its
    /// gradients, nothing may read the sum: its values are neither stored nor computed then.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward).
    pub fn add_to(&self, stream: &Tensor, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let out = self.output(x, false, pass)?;
        if pass.is_recomputed() { residual_unused(stream, &out) } else { residual(stream, &out) }
    }

    fn output(&self, x: &Tensor, needs_values: bool, pass: &ForwardPass) -> Result<Tensor> {
        if pass.tokens() == 0 {
            return Ok(x.clone());
        }
        let x = pass.gather(x)?;
        if self.is_shared(pass)? {
            return self.whole(&x, true, pass);
        }
        // With tensor parallelism, the bias is added to the values of the sum over ranks, so these are read.
        let needs_values = needs_values || self.down.has_bias() && !pass.attend().tensor_parallel().is_single_rank();
        if let Some([gate, up, down]) = self.plain_weights(pass)? {
            let out = match pass.store() {
                Some(store) => store.gated(&self.name, &x, [&gate, &up, &down], self.activation, needs_values)?,
                None => gated_mlp(&x, &gate, &up, &down, self.activation)?,
            };
            return pass.reduce(&out);
        }
        // There are no tiles on a GPU, and a layer that stores its products has the intermediate tensors of all rows anyway.
        if !gpu::holds(&x) && pass.store().is_none_or(|store| !store.stores_products()) {
            return self.tiled(&x, needs_values, pass);
        }
        self.whole(&x, needs_values, pass)
    }

    /// Whether several ranks have the rows of this pass and share the inner or the outer projections.
    fn is_shared(&self, pass: &ForwardPass) -> Result<bool> {
        Ok(self.is_inner_shared(pass)? || Projection::are_shared(&[&self.down], pass)?)
    }

    fn is_inner_shared(&self, pass: &ForwardPass) -> Result<bool> {
        match &self.inner {
            Inner::Separate(both) => Projection::are_shared(&both.each_ref(), pass),
            Inner::Stacked(both) => Projection::are_shared(&[both], pass),
        }
    }

    /// The output, computed with the intermediate tensors of all rows.
    fn whole(&self, x: &Tensor, needs_values: bool, pass: &ForwardPass) -> Result<Tensor> {
        let hidden = match self.shared_inner(x, pass)? {
            Some(hidden) => hidden,
            None => {
                let [gate, up] = match &self.inner {
                    Inner::Separate(both) => Projection::forward_all(both.each_ref(), x, pass)?,
                    Inner::Stacked(both) => halves(&both.forward(x, pass)?, 1)?,
                };
                gated(&gate, &up, self.activation)?
            }
        };
        reduced(&self.down, &hidden, needs_values, pass)
    }

    /// The input of the outer projection, `[T, width]`, if several ranks have the rows of this pass and share the inner projections: each
    /// applies the activation to its share, so that half as much is exchanged as by two layers.
    fn shared_inner(&self, x: &Tensor, pass: &ForwardPass) -> Result<Option<Tensor>> {
        let Some(ranks) = pass.replicated_rows() else { return Ok(None) };
        if x.dim(0)? == 0 || !self.is_inner_shared(pass)? {
            return Ok(None);
        }
        match &self.inner {
            Inner::Separate([gate, up]) => {
                let both = [(gate.weight(pass)?, gate.bias(pass)?), (up.weight(pass)?, up.bias(pass)?)];
                ranks.gated(x, both, self.activation).map(Some)
            }
            Inner::Stacked(both) => {
                let (weight, bias) = (both.weight(pass)?, both.bias(pass)?);
                let width = weight.dims()[0] / 2;
                if !ranks.all_have_outputs_of(width) {
                    return Ok(None);
                }
                let half = |first: usize| {
                    let bias = bias.map(|bias| bias.narrow(0, first, width)).transpose()?;
                    Ok::<_, candle_core::Error>((weight.row_range(first..first + width)?, bias))
                };
                let [gate, up] = [half(0)?, half(width)?];
                ranks.gated(x, [(&gate.0, gate.1.as_ref()), (&up.0, up.1.as_ref())], self.activation).map(Some)
            }
        }
    }

    /// The output, computed with the intermediate tensors of one tile of rows at a time.
    fn tiled(&self, x: &Tensor, needs_values: bool, pass: &ForwardPass) -> Result<Tensor> {
        let mut rows = GatedRows {
            inner: self.inner().iter().map(|linear| linear.load(pass)).collect::<Result<_>>()?,
            down: self.down.load(pass)?,
            activation: self.activation,
            adapter_rows: pass.adapter_rows(),
        };
        // With tensor parallelism, the bias is added once, after the sum over ranks.
        let is_whole = pass.attend().tensor_parallel().is_single_rank();
        let bias = if is_whole { None } else { rows.down.bias.take() };
        let out = match pass.store() {
            Some(store) => store.tiled(&self.name, x, rows, needs_values)?,
            None => tiled(x, rows)?,
        };
        let sum = pass.reduce(&out)?;
        match bias {
            Some(bias) => with_bias(&sum, &bias),
            None => Ok(sum),
        }
    }

    /// The projections of gate and up, or the one projection of both.
    fn inner(&self) -> &[Projection] {
        match &self.inner {
            Inner::Separate(both) => both,
            Inner::Stacked(both) => std::slice::from_ref(both),
        }
    }

    fn has_biases_or_adapters(&self, pass: &ForwardPass) -> bool {
        let is_more = |linear: &Projection| linear.has_bias() || pass.adapters().adapt(linear.name());
        self.inner().iter().any(is_more) || is_more(&self.down)
    }

    /// The weights of gate, up and down if all are dense and there are no biases or adapters, so that one fused operation can
    /// compute the layer.
    fn plain_weights(&self, pass: &ForwardPass) -> Result<Option<[Tensor; 3]>> {
        if self.has_biases_or_adapters(pass) {
            return Ok(None);
        }
        let dense = |linear: &Projection| {
            Ok::<_, candle_core::Error>(match linear.weight(pass)? {
                Weight::Dense(weight) => Some(weight.clone()),
                Weight::Quantized(_) | Weight::Stack(_) => None,
            })
        };
        let inner = match &self.inner {
            Inner::Separate([gate, up]) => dense(gate)?.zip(dense(up)?).map(<[Tensor; 2]>::from),
            Inner::Stacked(both) => dense(both)?.map(|both| halves(&both, 0)).transpose()?,
        };
        Ok(inner.zip(dense(&self.down)?).map(|([gate, up], down)| [gate, up, down]))
    }
}

/// The layer with the values of its parameters, as a row-wise function.
#[derive(Clone)]
struct GatedRows {
    /// The projections of gate and up, or the one projection of both.
    inner: Vec<LinearWithWeights>,
    down: LinearWithWeights,
    activation: Activation,
    adapter_rows: Option<AdapterRows>,
}

impl RowFunction for GatedRows {
    fn parameters(&mut self) -> Vec<&mut Tensor> {
        self.inner.iter_mut().chain([&mut self.down]).flat_map(LinearWithWeights::parameters).collect()
    }

    fn width(&self) -> Result<usize> {
        Ok(self.down.weight.dims()[0])
    }

    fn forward(&self, x: &Tensor, rows: Range<usize>, needs_values: bool) -> Result<Tensor> {
        let adapter_rows = self.adapter_rows.as_ref().map(|all| all.narrow(rows));
        let adapter_rows = adapter_rows.as_ref();
        let [gate, up] = match self.inner.as_slice() {
            [gate, up] => [gate.forward(x, adapter_rows, true)?, up.forward(x, adapter_rows, true)?],
            [both] => halves(&both.forward(x, adapter_rows, true)?, 1)?,
            _ => bail!("a gated layer of {} inner projections", self.inner.len()),
        };
        self.down.forward(&gated(&gate, &up, self.activation)?, adapter_rows, needs_values)
    }
}

fn halves(x: &Tensor, dim: usize) -> Result<[Tensor; 2]> {
    let half = x.dim(dim)? / 2;
    Ok([x.narrow(dim, 0, half)?, x.narrow(dim, half, half)?])
}
