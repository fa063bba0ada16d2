//! Loss and gradients, layer by layer: memory holds the graph of one layer, and the activations of the other layers that the
//! [`CheckpointPolicy`] stores.

mod graph;

use crate::decoder::Decoder;
use crate::error::{Error, Result};
use crate::parameters::Parameters;
use candle_core::{Tensor, Var};
pub use graph::{Graph, Recording};
use ringspan_candle::layers::ForwardPass;
use ringspan_candle::model::{Layer, constant};
use ringspan_candle::{ActivationStore, Adapters, Attend, CheckpointPolicy, StoredWeights, Unit};
use std::collections::BTreeMap;

/// Returns the negative log-likelihood, summed over the tokens with a target, and computes the gradients of `scale` times it.
///
/// Each unit of `parameters` is prefetched while the unit before it is computed, and dropped after its own computation.
/// `on_gradients` is called once for each unit with the gradients of its trained parameters, as soon as they are known. The order
/// depends on the model only: head, layers from the last to the first, embedding.
///
/// With context parallelism, each rank passes its own tokens, and all pass the same `policy`. A rank without tokens
/// still takes part in every attention, forward and backward, and yields zeros. With tensor parallelism
/// ([`TensorParallel`](ringspan_candle::TensorParallel)), `tokens` and `targets` are those of the whole group,
/// `parameters` returns the caller's shards, every caller gets the same log-likelihood, and the gradient of a parameter
/// that is replicated in the group is the sum of the callers' gradients.
///
/// # Errors
/// Tokens or targets outside the vocabulary, a loss on the load of experts that `attend` does not know of, failures of
/// other ranks, and what `on_gradients` returns.
#[expect(clippy::too_many_arguments, reason = "what a pass reads, how it computes, and who gets the gradients")]
pub fn loss_and_gradients<'a>(
    decoder: &Decoder,
    parameters: &dyn Parameters,
    tokens: &[u32],
    targets: &[u32],
    scale: f32,
    policy: impl Into<CheckpointPolicy<'a>>,
    attend: &'a dyn Attend,
    on_gradients: &mut dyn FnMut(Unit, Gradients) -> Result<()>,
) -> Result<f64> {
    if let Some(coefficient) = decoder.config().router_aux_loss().filter(|_| decoder.experts() > 0)
        && attend.experts().router_gradients(0).is_empty()
    {
        return Err(Error::Unbalanced { coefficient });
    }
    let (model, layers) = (decoder.model(), decoder.config().num_hidden_layers);
    let (embedding, head, tensor_parallel) = (model.embedding(), model.head(), attend.tensor_parallel());
    let store = ActivationStore::new(attend, policy.into(), layers);
    let trains = |name: &str| decoder.trains(name);
    let mut inputs = Vec::with_capacity(layers);
    let mut x = {
        let weights = parameters.unit(decoder, Unit::Embedding)?;
        parameters.prefetch(after(layers, None))?;
        decoder.embed(&weights, tokens, attend)?.detach()
    };
    for index in 0..layers {
        let weights = parameters.unit(decoder, Unit::Layer(index))?;
        parameters.prefetch(after(layers, Some(index)))?;
        store.forward(index)?;
        inputs.push(store.input(&x)?);
        let weights = constant(weights);
        x = model.layer(index).forward(&x, &ForwardPass::storing(&weights, decoder.adapter_sizes(), &store))?;
    }
    attend.experts().forward_ended(decoder.experts())?;

    let weights = decoder.head_parameters(parameters)?;
    parameters.prefetch(before(layers))?;
    let norm: StoredWeights = weights
        .iter()
        .filter(|(name, _)| *name == decoder.norm_name())
        .map(|(name, w)| (name.clone(), w.clone()))
        .collect();
    let (mut last, x) = (Graph::new(norm, trains)?, variable(x)?);
    let normed = last.record(|weights| decoder.norm(weights, &x))?;
    let loss = head.loss(&normed.output(), targets, scale, trains(head.weight_name()), &weights, tensor_parallel)?;
    drop(weights);
    last.differentiate(normed, loss.d_hidden)?;
    let (mut dx, mut gradients) = (last.take(&x)?, last.finish()?);
    drop(x);
    let mut d_head = loss.d_head;
    if !head.is_tied() {
        gradients.extend(d_head.take().map(|d_head| (head.weight_name().to_owned(), d_head)));
    }
    on_gradients(Unit::Head, gradients)?;

    for (index, input) in inputs.into_iter().enumerate().rev() {
        let weights = parameters.unit(decoder, Unit::Layer(index))?;
        if index > 0 {
            parameters.prefetch(before(index))?;
        }
        store.backward(index)?;
        let x = variable(input.tensor()?)?;
        drop(input);
        let mut graph = Graph::new(weights, trains)?;
        dx = backward_of_layer(model.layer(index), index, decoder.adapter_sizes(), &store, &mut graph, x, dx)?;
        let gradients = graph.finish()?;
        on_gradients(Unit::Layer(index), gradients)?;
    }

    let mut gradients = Gradients::new();
    if trains(embedding.weight_name()) {
        let mut gradient = embedding.backward(&dx, tokens, tensor_parallel)?;
        if let Some(d_head) = d_head {
            gradient = (gradient + d_head)?;
        }
        gradients.insert(embedding.weight_name().to_owned(), gradient);
    }
    on_gradients(Unit::Embedding, gradients)?;
    Ok(loss.nll_sum)
}

/// Differentiates layer `index` for its input x, a [`variable`], and the gradient dy of its output; returns the gradient of x. The
/// gradients of the layer's parameters, and of other variables that it reads, are in `graph`. `store` has the activations of the
/// forward pass.
///
/// On a CPU, what follows attention is differentiated first, and then, with queries, keys and values computed again, attention
/// and what is before it. So the activations of one part are in memory while those of the other are not, and the output of
/// attention is freed before its inputs are computed.
///
/// # Errors
/// As for the layer's forward pass, and failures of other ranks.
pub fn backward_of_layer(
    layer: &dyn Layer,
    index: usize,
    adapters: &Adapters,
    store: &ActivationStore,
    graph: &mut Graph,
    x: Tensor,
    dy: Tensor,
) -> Result<Tensor> {
    let pass = |weights: &StoredWeights, f: &dyn Fn(&ForwardPass) -> candle_core::Result<Tensor>| {
        Ok(f(&ForwardPass::storing(weights, adapters, store))?)
    };
    let mut attended = if x.device().is_cpu() { store.take_attention(index)? } else { None };
    if attended.is_none() && x.device().is_cpu() {
        let input = x.detach();
        graph.compute(|weights| pass(weights, &|pass| layer.attended(&input, pass)))?;
        attended = store.take_attention(index)?;
    }
    let Some(output_of_attention) = attended else {
        let whole = graph.record(|weights| pass(weights, &|pass| layer.forward(&x, pass)))?;
        graph.differentiate(whole, dy)?;
        return graph.take(&x);
    };

    let (tokens, heads, dim) = output_of_attention.dims3()?;
    let attended = variable(output_of_attention.reshape((tokens, heads * dim))?)?;
    drop(output_of_attention);
    let output = graph.record(|weights| pass(weights, &|pass| layer.output(&x, &attended, pass)))?;
    graph.differentiate(output, dy)?;
    let d_attended = graph.take(&attended)?;
    let of_heads = |flat: &Tensor| flat.detach().reshape((tokens, heads, dim));
    store.attention_gradient(index, &of_heads(&attended)?, &of_heads(&d_attended)?)?;
    drop(attended);

    let attended = graph.record_without_norms(|weights| pass(weights, &|pass| layer.attended(&x, pass)))?;
    graph.differentiate(attended, d_attended)?;
    graph.take(&x)
}

/// A variable with the values of x, which is freed: the values are copied.
///
/// # Errors
/// A device without memory for them.
pub fn variable(x: Tensor) -> Result<Tensor> {
    Ok(Var::from_tensor(&x)?.into_inner())
}

/// Gradients by the names of their parameters.
pub type Gradients = BTreeMap<String, Tensor>;

/// The unit that a forward pass needs after layer `layer`, or after the embedding if that is `None`.
fn after(layers: usize, layer: Option<usize>) -> Unit {
    let next = layer.map_or(0, |layer| layer + 1);
    if next < layers { Unit::Layer(next) } else { Unit::Head }
}

/// The unit that the backward pass needs next, while the first `layers` layers are still ahead of it. Below the first layer
/// nothing is prefetched: the embedding's backward pass needs no weights.
fn before(layers: usize) -> Unit {
    layers.checked_sub(1).map_or(Unit::Embedding, Unit::Layer)
}
