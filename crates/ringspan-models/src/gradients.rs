//! Gradients layer by layer, with recomputation: memory for one layer's graph, and what [`Keep`] says of each.

use crate::decoder::{Decoder, Weights};
use crate::error::{Error, Result};
use crate::parameters::{Parameters, Unit};
use crate::recompute::{Graph, Keep, Keeper, constant};
use candle_core::{DType, Tensor};
use ringspan_candle::cast::cast;
use ringspan_candle::{Attend, loss};
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
    keep: impl Into<Keep<'a>>,
    attend: &'a dyn Attend,
    on_gradients: &mut dyn FnMut(Unit, Gradients) -> Result<()>,
) -> Result<f64> {
    if let Some(coefficient) = decoder.config().router_aux_loss().filter(|_| decoder.experts() > 0)
        && attend.experts().pressures(0).is_empty()
    {
        return Err(Error::Unbalanced { coefficient });
    }
    let layers = decoder.config().num_hidden_layers;
    let shared = attend.tensor_parallel();
    let keep = keep.into();
    let keeper = Keeper::new(attend, keep, layers);
    let trains = |name: &str| decoder.trains(name);
    let graph = |index: usize, weights: Weights, x: &Tensor| {
        Graph::new(x, weights, trains, |local, x| match tokens.is_empty() {
            false => decoder.layer_keeping(local, index, x, &keeper, Some(&keeper)),
            // What this rank does for others.
            true => decoder.take_part(local, index, &keeper),
        })
    };
    let mut kept = Vec::with_capacity(layers);
    let (mut x, embedding_shape) = {
        let embedding = parameters.unit(decoder, Unit::Embedding)?;
        parameters.prefetch(after(layers, None))?;
        let shape = decoder.get(&embedding, decoder.embedding_name())?.dims().to_vec();
        (decoder.embed(&embedding, tokens, shared)?.detach(), shape)
    };
    for index in 0..layers {
        let layer = parameters.unit(decoder, Unit::Layer(index))?;
        parameters.prefetch(after(layers, Some(index)))?;
        keeper.forward(index)?;
        kept.push(keeper.kept(&x, keep.storage)?);
        x = decoder.layer_keeping(&constant(layer), index, &x, &keeper, Some(&keeper))?;
    }
    attend.experts().forward_ended(decoder.experts())?;

    let head = decoder.head_parameters(parameters)?;
    parameters.prefetch(before(layers))?;
    let hidden = shared.gather(&decoder.norm(&head, &x)?.detach(), tokens.len())?;
    let loss = loss::head_loss(&hidden, &decoder.head(&head)?, targets, scale, trains(decoder.head_name()), shared)?;
    let d_hidden = shared.reduce(&loss.d_hidden)?;
    let norm: Weights = head.into_iter().filter(|(name, _)| name == decoder.norm_name()).collect();
    let last = Graph::new(&x, norm, trains, |local, x| decoder.norm(local, x))?;
    let (mut dx, mut gradients) = last.backward(&d_hidden)?;
    let mut d_head = loss.d_head;
    if !decoder.config().tie_word_embeddings {
        gradients.extend(d_head.take().map(|d_head| (decoder.head_name().to_owned(), d_head)));
    }
    on_gradients(Unit::Head, gradients)?;

    for (index, input) in kept.into_iter().enumerate().rev() {
        let weights = parameters.unit(decoder, Unit::Layer(index))?;
        if index > 0 {
            parameters.prefetch(before(index))?;
        }
        keeper.backward(index)?;
        let layer = graph(index, weights, &input.tensor()?)?;
        drop(input);
        let (d_input, gradients) = layer.backward(&dx)?;
        dx = d_input;
        on_gradients(Unit::Layer(index), gradients)?;
    }

    let mut gradients = Gradients::new();
    if trains(decoder.embedding_name()) {
        let dx = shared.gather(&decoder.embedding_scaled(dx)?, tokens.len())?;
        let mut gradient = scatter(&dx, tokens, shared.part(decoder.config().vocab_size).start, &embedding_shape)?;
        if let Some(d_head) = d_head {
            gradient = (gradient + d_head)?;
        }
        gradients.insert(decoder.embedding_name().to_owned(), gradient);
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

/// Rows of `dx` `[T, C]` added up by token, of those that the embedding knows from the token `first` on: `[V, C]`.
fn scatter(dx: &Tensor, tokens: &[u32], first: usize, shape: &[usize]) -> Result<Tensor> {
    if !dx.device().is_cpu() {
        return scatter_on_gpu(dx, tokens, first, shape);
    }
    let width = shape.last().copied().unwrap_or(0);
    let mut sums = vec![0.0f32; shape.iter().product()];
    let rows: Vec<f32> = dx.flatten_all()?.to_vec1()?;
    for (row, &token) in rows.chunks_exact(width.max(1)).zip(tokens) {
        let at = (token as usize).checked_sub(first).map(|row| row * width);
        if let Some(sum) = at.and_then(|at| sums.get_mut(at..at + width)) {
            sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
    }
    Ok(Tensor::from_vec(sums, shape, dx.device())?)
}

/// The same where rows stay on a GPU, which adds them up in f32 and in the order of the tokens, too.
fn scatter_on_gpu(dx: &Tensor, tokens: &[u32], first: usize, shape: &[usize]) -> Result<Tensor> {
    let known = |(row, token): (usize, &u32)| {
        let place = (*token as usize).checked_sub(first).filter(|place| *place < shape[0])?;
        Some((row as u32, place as u32))
    };
    let (rows, places): (Vec<_>, Vec<_>) = tokens.iter().enumerate().filter_map(known).unzip();
    let zeros = Tensor::zeros(shape, DType::F32, dx.device())?;
    if rows.is_empty() {
        return Ok(zeros);
    }
    let dx = cast(&dx.contiguous()?.index_select(&Tensor::new(rows, dx.device())?, 0)?, DType::F32)?;
    Ok(zeros.index_add(&Tensor::new(places, dx.device())?, &dx, 0)?)
}
