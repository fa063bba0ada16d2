//! Gradients layer by layer: memory for one layer's graph, and what the [`CheckpointPolicy`] says of each.

mod graph;

use crate::decoder::Decoder;
use crate::error::{Error, Result};
use crate::parameters::Parameters;
use candle_core::Tensor;
use graph::Graph;
use ringspan_candle::layers::ForwardPass;
use ringspan_candle::model::constant;
use ringspan_candle::{ActivationStore, Attend, CheckpointPolicy, StoredWeights, Unit};
use std::collections::BTreeMap;

/// Negative log-likelihood, summed over this rank's tokens with a target, and the gradient of `scale` times it.
///
/// Units of `parameters` are asked for when they are needed, each announced while the one before is computed, and let go
/// after it. `on_gradients` gets the gradients of each unit's trained parameters once, as soon as they are known, in an
/// order that depends on the model only: head, layers from the last to the first, embedding. A rank without tokens takes
/// part in every attention, forward and backward, and yields zeros. All ranks must keep and
/// recompute alike.
///
/// Where ranks share layers ([`TensorParallel`](ringspan_candle::TensorParallel)), `tokens` and `targets` are those of all
/// of them, `parameters` gives this rank's portions, the log-likelihood is the same on each, and the gradient of what
/// several hold is the sum of theirs.
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
        && attend.experts().pressures(0).is_empty()
    {
        return Err(Error::Unbalanced { coefficient });
    }
    let (model, layers) = (decoder.model(), decoder.config().num_hidden_layers);
    let (embedding, head, tp) = (model.embedding(), model.head(), attend.tensor_parallel());
    let store = ActivationStore::new(attend, policy.into(), layers);
    let trains = |name: &str| decoder.trains(name);
    let forward = |index: usize, weights: &StoredWeights, x: &Tensor| {
        let pass = ForwardPass::storing(weights, decoder.adapters_beside(), &store);
        Ok(model.layer(index).forward(x, &pass)?)
    };
    let mut inputs = Vec::with_capacity(layers);
    let mut x = {
        let weights = parameters.unit(decoder, Unit::Embedding)?;
        parameters.prefetch(after(layers, None))?;
        decoder.embed(&weights, tokens, tp)?.detach()
    };
    for index in 0..layers {
        let weights = parameters.unit(decoder, Unit::Layer(index))?;
        parameters.prefetch(after(layers, Some(index)))?;
        store.forward(index)?;
        inputs.push(store.input(&x)?);
        x = forward(index, &constant(weights), &x)?;
    }
    attend.experts().forward_ended(decoder.experts())?;

    let weights = decoder.head_parameters(parameters)?;
    parameters.prefetch(before(layers))?;
    let hidden = decoder.norm(&weights, &x)?.detach();
    let loss = head.loss(&hidden, targets, scale, trains(head.weight_name()), &weights, tp)?;
    drop(hidden);
    let norm: StoredWeights = weights.into_iter().filter(|(name, _)| name == decoder.norm_name()).collect();
    let last = Graph::new(x, norm, trains, |local, x| decoder.norm(local, x))?;
    let (mut dx, mut gradients) = last.backward(loss.d_hidden)?;
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
        let x = input.tensor()?;
        drop(input);
        let layer = Graph::new(x, weights, trains, |local, x| forward(index, local, x))?;
        let (d_input, gradients) = layer.backward(dx)?;
        dx = d_input;
        on_gradients(Unit::Layer(index), gradients)?;
    }

    let mut gradients = Gradients::new();
    if trains(embedding.weight_name()) {
        let mut gradient = embedding.backward(&dx, tokens, tp)?;
        if let Some(d_head) = d_head {
            gradient = (gradient + d_head)?;
        }
        gradients.insert(embedding.weight_name().to_owned(), gradient);
    }
    on_gradients(Unit::Embedding, gradients)?;
    Ok(loss.nll_sum)
}

/// Gradients by the names of their parameters.
pub type Gradients = BTreeMap<String, Tensor>;

/// The unit that a forward pass needs after a layer, or after the embedding.
fn after(layers: usize, layer: Option<usize>) -> Unit {
    let next = layer.map_or(0, |layer| layer + 1);
    if next < layers { Unit::Layer(next) } else { Unit::Head }
}

/// The unit that a backward pass needs before the last `layers` of them; without any there is nothing to announce.
fn before(layers: usize) -> Unit {
    layers.checked_sub(1).map_or(Unit::Embedding, Unit::Layer)
}
