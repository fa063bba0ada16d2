//! Gradients layer by layer, with recomputation: memory for one layer's graph, and each layer's input.

use crate::decoder::{Decoder, Weights};
use crate::error::Result;
use crate::parameters::{Parameters, Unit};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use ringspan_candle::{Attend, loss};
use std::collections::BTreeMap;

/// Negative log-likelihood, summed over this rank's tokens with a target, and the gradient of `scale` times it.
///
/// Units of `parameters` are asked for when they are needed, each announced while the one before is computed, and let go
/// after it. `on_gradients` gets the gradients of each unit's trained parameters once, as soon as they are known, in an order that depends on the
/// model only: head, layers from the last to the first, embedding. A rank without tokens takes part in every attention,
/// forward and backward, and yields zeros.
///
/// # Errors
/// Tokens or targets outside the vocabulary, failures of other ranks, and what `on_gradients` returns.
pub fn loss_and_gradients(
    decoder: &Decoder,
    parameters: &dyn Parameters,
    tokens: &[u32],
    targets: &[u32],
    scale: f32,
    attend: &dyn Attend,
    on_gradients: &mut dyn FnMut(Unit, Gradients) -> Result<()>,
) -> Result<f64> {
    let layers = decoder.config().num_hidden_layers;
    let mut inputs = Vec::with_capacity(layers);
    let (mut x, embedding_shape) = {
        let embedding = parameters.unit(decoder, Unit::Embedding)?;
        parameters.prefetch(after(layers, None))?;
        let shape = decoder.get(&embedding, decoder.embedding_name())?.dims().to_vec();
        (decoder.embed(&embedding, tokens)?, shape)
    };
    for index in 0..layers {
        let layer = parameters.unit(decoder, Unit::Layer(index))?;
        parameters.prefetch(after(layers, Some(index)))?;
        let next = decoder.layer(&layer, index, &x, attend)?;
        inputs.push(std::mem::replace(&mut x, next));
    }
    attend.experts().forward_ended(decoder.experts())?;

    let head = decoder.head_parameters(parameters)?;
    parameters.prefetch(before(layers))?;
    let hidden = decoder.norm(&head, &x)?;
    let loss = loss::head_loss(&hidden, &decoder.head(&head)?, targets, scale)?;
    let norm: Weights = head.into_iter().filter(|(name, _)| name == decoder.norm_name()).collect();
    let trains = |name: &str| decoder.trains(name);
    let (mut dx, mut gradients) = differentiate(&x, &loss.d_hidden, norm, trains, |local, x| decoder.norm(local, x))?;
    let mut d_head = Some(loss.d_head).filter(|_| trains(decoder.head_name()));
    if !decoder.config().tie_word_embeddings {
        gradients.extend(d_head.take().map(|d_head| (decoder.head_name().to_owned(), d_head)));
    }
    on_gradients(Unit::Head, gradients)?;

    for (index, x) in inputs.into_iter().enumerate().rev() {
        let layer = parameters.unit(decoder, Unit::Layer(index))?;
        if index > 0 {
            parameters.prefetch(before(index))?;
        }
        let gradients = if tokens.is_empty() {
            // The recomputation and backward of what this rank does for others.
            let local = variables(layer, trains)?;
            let y = decoder.take_part(&local, index, attend)?;
            collect(&mut y.sum_all()?.backward()?, local, trains)?
        } else {
            let (d_input, gradients) =
                differentiate(&x, &dx, layer, trains, |local, x| decoder.layer(local, index, x, attend))?;
            dx = d_input;
            gradients
        };
        on_gradients(Unit::Layer(index), gradients)?;
    }

    let mut gradients = Gradients::new();
    if trains(decoder.embedding_name()) {
        let mut gradient = scatter(&decoder.embedding_scaled(dx)?, tokens, &embedding_shape)?;
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

/// Gradients of `sum(dy * f(parameters, x))`: of x, and of each parameter that is trained.
fn differentiate(
    x: &Tensor,
    dy: &Tensor,
    parameters: Weights,
    trains: impl Fn(&str) -> bool,
    f: impl FnOnce(&Weights, &Tensor) -> Result<Tensor>,
) -> Result<(Tensor, Gradients)> {
    if x.dim(0)? == 0 {
        let trained = parameters.into_iter().filter(|(name, _)| trains(name));
        let none = trained.map(|(name, tensor)| Ok((name, tensor.zeros_like()?)));
        return Ok((x.clone(), none.collect::<Result<_>>()?));
    }
    let input = Var::from_tensor(x)?;
    let local = variables(parameters, &trains)?;
    // Candle's backward starts from ones, so the incoming gradient enters as a factor.
    let y = f(&local, input.as_tensor())?;
    let mut store = (y * dy.detach())?.sum_all()?.backward()?;
    let dx = store.remove(input.as_tensor()).map_or_else(|| x.zeros_like(), Ok)?.detach();
    Ok((dx, collect(&mut store, local, trains)?))
}

/// Parameters that a graph can be differentiated in, where they are trained.
fn variables(parameters: Weights, trains: impl Fn(&str) -> bool) -> Result<Weights> {
    // One by one, so that no more than a parameter is there twice.
    let variable = |(name, tensor): (String, Tensor)| match trains(&name) {
        true => Ok((name, Var::from_tensor(&tensor)?.into_inner())),
        false => Ok((name, tensor)),
    };
    parameters.into_iter().map(variable).collect()
}

/// The gradient of each parameter that is trained: zeros of those that took no part.
fn collect(store: &mut GradStore, parameters: Weights, trains: impl Fn(&str) -> bool) -> Result<Gradients> {
    let trained = parameters.into_iter().filter(|(name, _)| trains(name));
    let gradient = |(name, tensor): (String, Tensor)| {
        Ok((name, store.remove(&tensor).map_or_else(|| tensor.zeros_like(), Ok)?.detach()))
    };
    trained.map(gradient).collect()
}

/// Rows of `dx` `[T, C]` added up by token: `[V, C]`.
fn scatter(dx: &Tensor, tokens: &[u32], shape: &[usize]) -> Result<Tensor> {
    let width = shape.last().copied().unwrap_or(0);
    let mut sums = vec![0.0f32; shape.iter().product()];
    let rows: Vec<f32> = dx.flatten_all()?.to_vec1()?;
    for (row, &token) in rows.chunks_exact(width.max(1)).zip(tokens) {
        let at = token as usize * width;
        sums[at..at + width].iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }
    Ok(Tensor::from_vec(sums, shape, &Device::Cpu)?)
}
