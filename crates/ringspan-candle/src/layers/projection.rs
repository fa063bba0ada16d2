//! One weight matrix with its bias and adapter, from which all linear layers are built.

use super::ForwardPass;
use crate::adapter_rows::AdapterRows;
use crate::layer_adapter::{LayerAdapter, adapted_rows};
use crate::linear_adapted::FrozenLinear;
use crate::lora::{weight_names, weight_names_by_slot};
use crate::parameters::{Init, Scope};
use crate::residual::residual;
use crate::shard::{ShardSpec, Split};
use crate::weight::Weight;
use candle_core::{Result, Tensor, bail};

/// Computes `x weight^T + bias` and adds the contribution of the adapter, for this rank's shard of the weight.
#[derive(Debug, Clone)]
pub(super) struct Projection {
    name: String,
    weight: String,
    bias: Option<String>,
    adapter: [String; 2],
    /// The width of the whole input, and how its columns are distributed over ranks, if they are.
    inputs: usize,
    columns: Option<Split>,
    /// Whether each rank holds the whole layer, and so computes it for its own rows.
    replicated: bool,
}

impl Projection {
    /// Adds a weight `[outputs, inputs]` and, if asked for, a bias `[outputs]`.
    pub(super) fn new(scope: &Scope, sizes: [usize; 2], bias: bool, shard: ShardSpec) -> Self {
        scope.linear_layer(sizes, shard, false);
        Self::of_kind(scope, sizes, bias.then_some(Init::Constant(0.0)), shard)
    }

    /// Like [`new`](Self::new), for the router of a mixture of experts, which each rank holds whole. It can have an adapter
    /// only if it is `adaptable`.
    pub(super) fn router(scope: &Scope, sizes: [usize; 2], bias: bool, adaptable: bool) -> Self {
        if adaptable {
            scope.linear_layer(sizes, ShardSpec::Replicated, true);
        }
        Self::of_kind(scope, sizes, bias.then_some(Init::Normal), ShardSpec::Replicated)
    }

    fn of_kind(scope: &Scope, [outputs, inputs]: [usize; 2], bias: Option<Init>, shard: ShardSpec) -> Self {
        let weight = scope.parameter("weight", &[outputs, inputs], shard, Init::Normal);
        let columns = match shard {
            ShardSpec::Columns(split) => Some(split),
            _ => None,
        };
        let replicated = shard == ShardSpec::Replicated;
        // Where ranks sum over shards of the columns, the whole bias is added once.
        let of_bias = if columns.is_some() { ShardSpec::Replicated } else { shard };
        let bias = bias.map(|init| scope.parameter("bias", &[outputs], of_bias, init));
        Self {
            name: scope.name().into(),
            weight,
            bias,
            adapter: weight_names(scope.name()),
            inputs,
            columns,
            replicated,
        }
    }

    /// The name of the layer, without `.weight`.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The name of the weight.
    pub(super) fn weight_name(&self) -> &str {
        &self.weight
    }

    /// Whether the layer has a bias.
    pub(super) fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    pub(super) fn weight<'a>(&self, pass: &ForwardPass<'a>) -> Result<&'a Weight> {
        pass.weight(&self.weight)
    }

    pub(super) fn bias<'a>(&self, pass: &ForwardPass<'a>) -> Result<Option<&'a Tensor>> {
        self.bias.as_ref().map(|bias| pass.tensor(bias)).transpose()
    }

    /// x `[T, in]` to `[T, out]`, with the bias.
    pub(super) fn forward(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        self.product(x, self.bias(pass)?, true, pass)
    }

    /// Like [`forward`](Self::forward), with this bias instead; `needs_values` says whether anything reads the output values when the
    /// layer is recomputed.
    pub(super) fn product(
        &self,
        x: &Tensor,
        bias: Option<&Tensor>,
        needs_values: bool,
        pass: &ForwardPass,
    ) -> Result<Tensor> {
        let weight = self.weight(pass)?;
        if x.dim(0)? == 0 {
            return weight.linear(x, bias);
        }
        if Self::are_shared(&[self], pass)? {
            let [out] = Self::shared([(self, bias)], x, pass)?;
            return Ok(out);
        }
        let adapter = self.adapter(pass)?;
        match (&adapter, FrozenLinear::new(weight, bias)) {
            (Some(LayerAdapter::One(adapter)), Some(frozen)) => {
                let narrow = adapter.down(x, self.adapter_rows(pass).as_ref())?;
                return match pass.store() {
                    Some(store) => store.adapted(&self.name, x, frozen, [&narrow, &adapter.b], needs_values),
                    None => frozen.with_adapter(x, &narrow, &adapter.b),
                };
            }
            (Some(LayerAdapter::BySlot(adapters)), Some(frozen)) => {
                return frozen.with_adapted_rows(x, &adapted_rows(adapters, x, self.adapter_rows(pass).as_ref())?);
            }
            _ => {}
        }
        let out = match pass.store() {
            Some(store) => store.linear(&self.name, x, weight, bias, needs_values)?,
            None => weight.linear(x, bias)?,
        };
        match adapter {
            Some(adapter) => residual(&out, &adapter.delta(x, self.adapter_rows(pass).as_ref())?),
            None => Ok(out),
        }
    }

    /// The outputs of several layers for the same x `[T, in]`, with their biases: `[T, out]` each.
    pub(super) fn forward_all<const N: usize>(
        projections: [&Self; N],
        x: &Tensor,
        pass: &ForwardPass,
    ) -> Result<[Tensor; N]> {
        if x.dim(0)? > 0 && Self::are_shared(&projections, pass)? {
            let mut layers = projections.map(|projection| (projection, None));
            for (projection, bias) in &mut layers {
                *bias = projection.bias(pass)?;
            }
            return Self::shared(layers, x, pass);
        }
        let mut outputs = projections.map(|_| x.clone());
        for (output, projection) in outputs.iter_mut().zip(projections) {
            *output = projection.forward(x, pass)?;
        }
        Ok(outputs)
    }

    /// Whether several ranks have the rows of this pass and share these layers, which have the same input. Layers with adapters are not
    /// shared: their sums are rounded once, after the adapter's part is added.
    pub(super) fn are_shared(projections: &[&Self], pass: &ForwardPass) -> Result<bool> {
        let Some(ranks) = pass.replicated_rows() else { return Ok(false) };
        if projections.iter().any(|projection| pass.adapters().adapt(&projection.name)) {
            return Ok(false);
        }
        let weights = projections.iter().map(|projection| projection.weight(pass)).collect::<Result<Vec<_>>>()?;
        Ok(ranks.share(&weights))
    }

    /// The outputs of several layers with these biases for the same x, computed together with the other ranks that have x.
    fn shared<const N: usize>(
        layers: [(&Self, Option<&Tensor>); N],
        x: &Tensor,
        pass: &ForwardPass,
    ) -> Result<[Tensor; N]> {
        let Some(ranks) = pass.replicated_rows() else { bail!("no other rank has the rows of this pass") };
        let mut weights = Vec::with_capacity(N);
        for (projection, bias) in layers {
            weights.push((projection.weight(pass)?, bias));
        }
        let Ok(weights) = <[_; N]>::try_from(weights) else { bail!("a weight for each of {N} layers") };
        ranks.linear(x, weights)
    }

    /// What the layer's adapter needs to know of its input rows: of this rank's rows if it holds the layer whole, else of all tokens of
    /// the group.
    fn adapter_rows(&self, pass: &ForwardPass) -> Option<AdapterRows> {
        let (rows, tp) = (pass.adapter_rows()?, pass.attend().tensor_parallel());
        Some(match self.replicated && !tp.is_single_rank() {
            true => rows.narrow(tp.shard_range(pass.tokens())),
            false => rows,
        })
    }

    /// The adapter of the layer, if it has one, or its adapters by slot.
    pub(super) fn adapter(&self, pass: &ForwardPass) -> Result<Option<LayerAdapter>> {
        let all = pass.adapters();
        if let Some(settings) = all.adapter_of(&self.name) {
            let [a, b] = &self.adapter;
            let adapter = settings.adapter(pass.tensor(a)?, pass.tensor(b)?, self.first_column(pass)?);
            return Ok(Some(LayerAdapter::One(adapter)));
        }
        let mut by_slot = Vec::new();
        for (slot, adapters) in &all.by_slot {
            let Some(settings) = adapters.adapter_of(&self.name) else { continue };
            let [a, b] = weight_names_by_slot(&self.name, *slot);
            by_slot.push((*slot, settings.adapter(pass.tensor(&a)?, pass.tensor(&b)?, self.first_column(pass)?)));
        }
        Ok((!by_slot.is_empty()).then_some(LayerAdapter::BySlot(by_slot)))
    }

    /// The layer with the values of its parameters.
    pub(super) fn load(&self, pass: &ForwardPass) -> Result<LinearWithWeights> {
        Ok(LinearWithWeights {
            weight: self.weight(pass)?.clone(),
            bias: self.bias(pass)?.cloned(),
            adapter: self.adapter(pass)?,
        })
    }

    /// The first column of the whole input that this rank holds.
    fn first_column(&self, pass: &ForwardPass) -> Result<usize> {
        let tp = pass.attend().tensor_parallel();
        Ok(match self.columns {
            None => 0,
            Some(Split::QueryHeads(heads, dim)) => {
                heads.of_rank(tp.rank_and_size()).map_err(candle_core::Error::wrap)?.queries.start * dim
            }
            Some(Split::KeyValueHeads(heads, dim)) => {
                heads.of_rank(tp.rank_and_size()).map_err(candle_core::Error::wrap)?.key_values.start * dim
            }
            Some(Split::Even(_)) => tp.shard_range(self.inputs).start,
            Some(Split::ExpertWidth(_)) => pass.attend().experts().local_width(self.inputs).start,
        })
    }
}

/// A linear layer with the values of its parameters, for use where no [`ForwardPass`] is available.
#[derive(Debug, Clone)]
pub(super) struct LinearWithWeights {
    pub(super) weight: Weight,
    pub(super) bias: Option<Tensor>,
    pub(super) adapter: Option<LayerAdapter>,
}

impl LinearWithWeights {
    /// The tensors that can be trained: a dense weight, the bias and the adapter's matrices, as far as they exist.
    pub(super) fn parameters(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let weight = match &mut self.weight {
            Weight::Dense(weight) => Some(weight),
            Weight::Quantized(_) | Weight::Stack(_) => None,
        };
        let adapter = self.adapter.iter_mut().flat_map(|adapter| match adapter {
            LayerAdapter::One(adapter) => vec![&mut adapter.a, &mut adapter.b],
            LayerAdapter::BySlot(_) => Vec::new(),
        });
        weight.into_iter().chain(&mut self.bias).chain(adapter)
    }

    /// x `[T, in]` to `[T, out]`. Unless `needs_values`, nothing reads the output values, only gradients.
    pub(super) fn forward(&self, x: &Tensor, adapter_rows: Option<&AdapterRows>, needs_values: bool) -> Result<Tensor> {
        match (&self.adapter, FrozenLinear::new(&self.weight, self.bias.as_ref())) {
            (Some(LayerAdapter::One(adapter)), Some(frozen)) => {
                let narrow = adapter.down(x, adapter_rows)?;
                return match needs_values {
                    true => frozen.with_adapter(x, &narrow, &adapter.b),
                    false => frozen.with_adapter_recomputed(x, &narrow, &adapter.b, None),
                };
            }
            (Some(LayerAdapter::BySlot(adapters)), Some(frozen)) => {
                return frozen.with_adapted_rows(x, &adapted_rows(adapters, x, adapter_rows)?);
            }
            _ => {}
        }
        let out = match needs_values {
            true => self.weight.linear(x, self.bias.as_ref())?,
            false => self.weight.linear_recomputed(x, self.bias.as_ref(), None)?,
        };
        match &self.adapter {
            Some(adapter) => residual(&out, &adapter.delta(x, adapter_rows)?),
            None => Ok(out),
        }
    }
}
