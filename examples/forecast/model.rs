//! A transformer without tokens or a vocabulary: readings of sensors in, a forecast of the next readings out.
//!
//! Shape letters: T readings on this rank, F sensors, C hidden size.

use crate::sensors::SENSORS;
use candle_core::{Result, Tensor};
use ringspan::{Mask, Score};
use ringspan_candle::activation::Activation;
use ringspan_candle::gradients::{EmbeddingOutputGradients, Gradients, Graph, LossGradients, TrainableModel, variable};
use ringspan_candle::layers::{
    Attention, ForwardPass, GatedMlp, QkvLinear, ReplicatedLinear, RmsNorm, RotaryEmbedding, RowLinear,
    inverse_frequencies,
};
use ringspan_candle::model::{Layer, ModelBuilder, ModelParameters, Scope, UnitWeights};
use ringspan_candle::shard::HeadCounts;
use ringspan_candle::{Adapters, Attend, Model, StoredWeights, Unit};

const LAYERS: usize = 2;
const HIDDEN: usize = 64;
const MLP_WIDTH: usize = 128;
const HEADS: HeadCounts = HeadCounts { queries: 4, key_values: 2 };
const HEAD_DIM: usize = 16;
const EPS: f64 = 1e-6;

/// What a step computes with, on one rank.
pub(crate) struct Readings<'a> {
    /// The readings `[T, F]`.
    pub(crate) inputs: &'a Tensor,
    /// The reading that follows each, `[T, F]`.
    pub(crate) targets: &'a Tensor,
    /// How many numbers the targets of all ranks have: the loss is a mean over them.
    pub(crate) count: usize,
}

/// The model: a projection of readings, layers, a norm, and a projection to readings.
#[derive(Debug)]
pub(crate) struct Forecaster {
    embedding: ReplicatedLinear,
    layers: Vec<ForecasterLayer>,
    norm: RmsNorm,
    head: ReplicatedLinear,
    parameters: ModelParameters,
    adapters: Adapters,
}

impl Forecaster {
    pub(crate) fn new() -> Self {
        let builder = ModelBuilder::new();
        let layer = |index| ForecasterLayer::new(index, &builder.unit(Unit::Layer(index), format!("layers.{index}")));
        Self {
            embedding: ReplicatedLinear::new(&builder.unit(Unit::Embedding, "embedding"), SENSORS, HIDDEN, false),
            layers: (0..LAYERS).map(layer).collect(),
            norm: RmsNorm::new(&builder.unit(Unit::Head, "norm"), HIDDEN, EPS),
            head: ReplicatedLinear::new(&builder.unit(Unit::Head, "head"), HIDDEN, SENSORS, false),
            parameters: builder.finish(),
            adapters: Adapters::none(),
        }
    }
}

impl Model for Forecaster {
    type Batch<'a> = Readings<'a>;
    type Conditions = ();

    fn all_parameters(&self) -> &ModelParameters {
        &self.parameters
    }

    fn adapter_sizes(&self) -> &Adapters {
        &self.adapters
    }

    fn layer_count(&self) -> usize {
        self.layers.len()
    }

    fn embedded(&self, batch: &Readings, pass: &ForwardPass) -> Result<(Tensor, ())> {
        Ok((self.embedding.forward(batch.inputs, pass)?, ()))
    }

    fn conditioned_layer<'a>(&'a self, index: usize, _: &'a Readings, (): &'a ()) -> Box<dyn Layer + 'a> {
        Box::new(&self.layers[index])
    }
}

impl TrainableModel for Forecaster {
    fn trains(&self, _name: &str) -> bool {
        true
    }

    fn embedding_gradients_need_weights(&self) -> bool {
        true
    }

    fn condition_variables<'a>(&self, (): &'a ()) -> Vec<&'a Tensor> {
        Vec::new()
    }

    /// This rank's part of the mean squared error.
    fn loss(
        &self,
        batch: &Readings,
        (): &(),
        x: Tensor,
        weights: StoredWeights,
        attend: &dyn Attend,
    ) -> Result<LossGradients> {
        let mut graph = Graph::new(weights, |name| self.trains(name))?;
        let x = variable(x)?;
        let forecast = graph.record(|weights| {
            let pass = ForwardPass::new(weights, attend, &self.adapters);
            self.head.forward(&self.norm.forward(&x, &pass)?, &pass)
        })?;
        let error = (forecast.output() - batch.targets)?;
        let count = batch.count as f64;
        let loss = f64::from(error.sqr()?.sum_all()?.to_scalar::<f32>()?) / count;
        graph.differentiate(forecast, (error * (2.0 / count))?)?;
        let d_x = graph.take(&x)?;
        Ok(LossGradients { loss, d_x, d_conditions: Vec::new(), gradients: graph.finish()? })
    }

    fn embedding_gradients(
        &self,
        batch: &Readings,
        weights: &dyn UnitWeights,
        output: EmbeddingOutputGradients,
        attend: &dyn Attend,
    ) -> Result<Gradients> {
        let weights = weights.unit(Unit::Embedding, self.parameters.of_unit(Unit::Embedding))?;
        let mut graph = Graph::new(weights, |name| self.trains(name))?;
        let embedded = graph.record(|weights| {
            self.embedding.forward(batch.inputs, &ForwardPass::new(weights, attend, &self.adapters))
        })?;
        graph.differentiate(embedded, output.d_x)?;
        graph.finish()
    }
}

#[derive(Debug)]
struct ForecasterLayer {
    attention_norm: RmsNorm,
    qkv: QkvLinear,
    rope: RotaryEmbedding,
    attention: Attention,
    attention_output: RowLinear,
    mlp_norm: RmsNorm,
    mlp: GatedMlp,
}

impl ForecasterLayer {
    fn new(index: usize, scope: &Scope) -> Self {
        let (attention, score) = (scope.at("attention"), Score::new(1.0 / (HEAD_DIM as f32).sqrt()));
        let frequencies = inverse_frequencies(10_000.0, HEAD_DIM);
        Self {
            attention_norm: RmsNorm::new(&scope.at("attention_norm"), HIDDEN, EPS),
            qkv: QkvLinear::new(&attention, HIDDEN, HEADS, HEAD_DIM, false),
            rope: RotaryEmbedding { id: 0, frequencies, interleaved: false, scale: 1.0, by_length: None },
            attention: Attention::new(&attention, index, HEADS, Mask::causal(), score),
            attention_output: RowLinear::from_heads(&attention.at("output"), HEADS, HEAD_DIM, HIDDEN, false),
            mlp_norm: RmsNorm::new(&scope.at("mlp_norm"), HIDDEN, EPS),
            mlp: GatedMlp::new(&scope.at("mlp"), HIDDEN, MLP_WIDTH, false, Activation::Silu),
        }
    }
}

impl Layer for ForecasterLayer {
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> Result<[Tensor; 3]> {
        let [q, k, v] = self.qkv.forward(&self.attention_norm.forward(x, pass)?, pass)?;
        Ok([self.rope.forward(q, pass)?, self.rope.forward(k, pass)?, v])
    }

    fn output(&self, x: &Tensor, attended: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let attended = self.attention_output.forward(attended, pass)?;
        let (x, normed) = self.mlp_norm.add_and_norm(x, &attended, pass)?;
        self.mlp.add_to(&x, &normed, pass)
    }

    fn attention(&self) -> &Attention {
        &self.attention
    }
}
