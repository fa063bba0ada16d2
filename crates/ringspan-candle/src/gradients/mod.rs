//! Loss and gradients of a model, unit by unit: memory holds the graph of one layer, and the activations of the other layers that the
//! [`CheckpointPolicy`] stores.

mod graph;
mod layer_backward;

pub use graph::{Graph, Recording, variable};
pub use layer_backward::backward_of_layer;

use crate::activation_store::{ActivationStore, CheckpointPolicy};
use crate::attend::Attend;
use crate::layers::ForwardPass;
use crate::model::{Model, StoredWeights, Unit, UnitWeights, constant};
use candle_core::{Result, Tensor, bail};
use std::collections::BTreeMap;

/// Gradients by the names of their parameters.
pub type Gradients = BTreeMap<String, Tensor>;

/// A model with a loss, whose gradients [`loss_and_gradients`] computes.
pub trait TrainableModel: Model {
    /// Whether a parameter receives a gradient (PyTorch's `requires_grad`).
    fn trains(&self, name: &str) -> bool;

    /// Refuses a batch before anything is computed or gathered, alike on all ranks.
    ///
    /// # Errors
    /// A loss that needs something `attend` lacks, such as a router's loss where its experts give the router no gradient.
    fn check(&self, _batch: &Self::Batch<'_>, _attend: &dyn Attend) -> Result<()> {
        Ok(())
    }

    /// Whether [`embedding_gradients`](Self::embedding_gradients) takes the embedding's weights, which are then prefetched.
    fn embedding_gradients_need_weights(&self) -> bool {
        false
    }

    /// The units whose parameters the output head reads: its own, and the embedding's where they share a matrix.
    fn head_units(&self) -> Vec<Unit> {
        vec![Unit::Head]
    }

    /// The weights of all [`head_units`](Self::head_units).
    ///
    /// # Errors
    /// Missing weights, failures of other ranks that hold them.
    fn head_weights(&self, weights: &dyn UnitWeights) -> Result<StoredWeights> {
        let mut head = StoredWeights::new();
        for unit in self.head_units() {
            head.extend(weights.unit(unit, self.all_parameters().of_unit(unit))?);
        }
        Ok(head)
    }

    /// The [`variable`]s among the conditions of a pass, of which layers, head and embedding need gradients.
    fn condition_variables<'a>(&self, conditions: &'a Self::Conditions) -> Vec<&'a Tensor>;

    /// The loss of a batch for the last layer's output x `[T, C]`, and its gradients. The parameters of [`head_units`](Self::head_units)
    /// are in `weights`.
    ///
    /// # Errors
    /// A batch that does not fit the model, missing parameters, failures of other ranks.
    fn loss(
        &self,
        batch: &Self::Batch<'_>,
        conditions: &Self::Conditions,
        x: Tensor,
        weights: StoredWeights,
        attend: &dyn Attend,
    ) -> Result<LossGradients>;

    /// The gradients of the embedding's parameters. An embedding that computes with them again takes them from `weights`.
    ///
    /// # Errors
    /// Missing parameters, failures of other ranks.
    fn embedding_gradients(
        &self,
        batch: &Self::Batch<'_>,
        weights: &dyn UnitWeights,
        output: EmbeddingOutputGradients,
        attend: &dyn Attend,
    ) -> Result<Gradients>;
}

/// A loss, and its gradients with respect to what the output head reads.
#[derive(Debug)]
pub struct LossGradients {
    /// The loss, or this rank's part of it.
    pub loss: f64,
    /// The gradient of the last layer's output, `[T, C]`.
    pub d_x: Tensor,
    /// The gradients of the [variables](TrainableModel::condition_variables) among the conditions; `None` for one that the head does not
    /// read.
    pub d_conditions: Vec<Option<Tensor>>,
    /// The gradients of trained parameters. A matrix that head and embedding share is among them; its gradient is added to the embedding's.
    pub gradients: Gradients,
}

/// Gradients with respect to what the embedding has computed.
#[derive(Debug)]
pub struct EmbeddingOutputGradients {
    /// The gradient of the first layer's input, `[T, C]`.
    pub d_x: Tensor,
    /// The gradients of the [variables](TrainableModel::condition_variables) among the conditions.
    pub d_conditions: Vec<Tensor>,
}

/// Returns the loss of a batch, or this rank's part of it, and computes its gradients.
///
/// Each unit of `weights` is prefetched while the unit before it is computed, and dropped after its own computation.
/// `on_gradients` is called once for each unit with the gradients of its trained parameters, as soon as they are known. The order
/// depends on the model only: head, layers from the last to the first, embedding.
///
/// With context parallelism, each rank passes its own tokens, and all pass the same `policy`. A rank without tokens
/// still takes part in every attention, forward and backward, and yields zeros. With tensor parallelism
/// ([`TensorParallel`](crate::TensorParallel)), a batch has the tokens of the whole group,
/// `weights` returns the caller's shards, every caller gets the same loss, and the gradient of a parameter
/// that is replicated in the group is the sum of the callers' gradients.
///
/// # Errors
/// A batch that does not fit the model, missing weights, failures of other ranks, and what `on_gradients` returns. Errors of other crates
/// are [wrapped](candle_core::Error::wrap), so only their texts remain.
pub fn loss_and_gradients<'a, M: TrainableModel>(
    model: &M,
    weights: &dyn UnitWeights,
    batch: &M::Batch<'_>,
    policy: impl Into<CheckpointPolicy<'a>>,
    attend: &'a dyn Attend,
    on_gradients: &mut dyn FnMut(Unit, Gradients) -> Result<()>,
) -> Result<f64> {
    model.check(batch, attend)?;
    let (layers, adapters) = (model.layer_count(), model.adapter_sizes());
    let unit = |unit: Unit| weights.unit(unit, model.all_parameters().of_unit(unit));
    let store = ActivationStore::new(attend, policy.into(), layers);
    let (mut x, conditions) = {
        let embedding = constant(unit(Unit::Embedding)?);
        weights.prefetch(after(layers, None))?;
        let (x, conditions) = model.embedded(batch, &ForwardPass::new(&embedding, attend, adapters))?;
        (x.detach(), conditions)
    };
    let mut inputs = Vec::with_capacity(layers);
    for index in 0..layers {
        let parameters = unit(Unit::Layer(index))?;
        weights.prefetch(after(layers, Some(index)))?;
        store.forward(index)?;
        inputs.push(store.input(&x)?);
        let parameters = constant(parameters);
        let layer = model.conditioned_layer(index, batch, &conditions);
        // Variables among the conditions would be recorded by candle here, and what it records is of no use.
        x = layer.forward(&x, &ForwardPass::storing(&parameters, adapters, &store))?.detach();
    }
    attend.experts().forward_ended(model.experts())?;

    let head = model.head_weights(weights)?;
    weights.prefetch(before(layers))?;
    let LossGradients { loss, d_x, mut d_conditions, mut gradients } =
        model.loss(batch, &conditions, x, head, attend)?;
    let is_of_embedding =
        |name: &String| model.all_parameters().of_unit(Unit::Embedding).iter().any(|parameter| parameter.name == *name);
    let shared: Gradients = gradients.extract_if(.., |name, _| is_of_embedding(name)).collect();
    on_gradients(Unit::Head, gradients)?;

    let (mut d_x, variables) = (d_x, model.condition_variables(&conditions));
    if d_conditions.len() != variables.len() {
        bail!("a loss has gradients of {} conditions, and the model has {}", d_conditions.len(), variables.len());
    }
    for (index, input) in inputs.into_iter().enumerate().rev() {
        let parameters = unit(Unit::Layer(index))?;
        if index > 0 || model.embedding_gradients_need_weights() {
            weights.prefetch(before(index))?;
        }
        store.backward(index)?;
        let x = variable(input.tensor()?)?;
        drop(input);
        let mut graph = Graph::new(parameters, |name| model.trains(name))?;
        let layer = model.conditioned_layer(index, batch, &conditions);
        d_x = backward_of_layer(&*layer, index, adapters, &store, &mut graph, x, d_x)?;
        for (sum, variable) in d_conditions.iter_mut().zip(&variables) {
            let Some(gradient) = graph.take_known(variable) else { continue };
            *sum = Some(match sum.take() {
                Some(sum) => (sum + gradient)?,
                None => gradient,
            });
        }
        on_gradients(Unit::Layer(index), graph.finish()?)?;
    }

    let known = d_conditions.into_iter().zip(variables);
    let d_conditions = known.map(|(known, variable)| known.map_or_else(|| variable.zeros_like(), Ok));
    let output = EmbeddingOutputGradients { d_x, d_conditions: d_conditions.collect::<Result<_>>()? };
    let mut gradients = model.embedding_gradients(batch, weights, output, attend)?;
    for (name, of_head) in shared {
        let sum = match gradients.remove(&name) {
            Some(of_embedding) => (of_embedding + of_head)?,
            None => of_head,
        };
        gradients.insert(name, sum);
    }
    on_gradients(Unit::Embedding, gradients)?;
    Ok(loss)
}

/// The unit that a forward pass needs after layer `layer`, or after the embedding if that is `None`.
fn after(layers: usize, layer: Option<usize>) -> Unit {
    let next = layer.map_or(0, |layer| layer + 1);
    if next < layers { Unit::Layer(next) } else { Unit::Head }
}

/// The unit that the backward pass needs next, while the first `layers` layers are still ahead of it.
fn before(layers: usize) -> Unit {
    layers.checked_sub(1).map_or(Unit::Embedding, Unit::Layer)
}
