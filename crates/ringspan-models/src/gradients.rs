//! Gradients layer by layer, with recomputation: memory for one layer's graph, and each layer's input.

use crate::decoder::{Decoder, Weights};
use crate::error::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use ringspan_candle::{Attend, loss};

/// Negative log-likelihood, summed over this rank's tokens with a target, and the gradient of `scale` times it.
///
/// `on_gradient` gets every parameter's gradient once, as soon as it is known, in an order that depends on the model
/// only: head (unless tied), last norm, layers from the last to the first, embedding. A rank without tokens takes part
/// in every attention, forward and backward, and yields zeros.
///
/// # Errors
/// Tokens or targets outside the vocabulary, a loss on the load of experts that `attend` does not know of, failures of
/// other ranks, and what `on_gradient` returns.
pub fn loss_and_gradients(
    decoder: &Decoder,
    weights: &Weights,
    tokens: &[u32],
    targets: &[u32],
    scale: f32,
    attend: &dyn Attend,
    on_gradient: &mut dyn FnMut(&str, Tensor) -> Result<()>,
) -> Result<f64> {
    if let Some(coefficient) = decoder.config().router_aux_loss().filter(|_| decoder.experts() > 0)
        && attend.experts().pressures(0).is_empty()
    {
        return Err(Error::Unbalanced { coefficient });
    }
    let layers = decoder.config().num_hidden_layers;
    let variable = |name: &str| -> Result<Var> { Ok(Var::from_tensor(decoder.get(weights, name)?)?) };
    let mut inputs = Vec::with_capacity(layers);
    let mut x = decoder.embed(weights, tokens)?;
    for index in 0..layers {
        let next = decoder.layer(weights, index, &x, attend)?;
        inputs.push(std::mem::replace(&mut x, next));
    }
    attend.experts().forward_ended(decoder.experts())?;

    let hidden = decoder.norm(weights, &x)?;
    let loss = loss::head_loss(&hidden, &decoder.head(weights)?, targets, scale)?;
    let tied = decoder.config().tie_word_embeddings;
    if !tied {
        on_gradient(decoder.head_name(), loss.d_head.clone())?;
    }
    let name = decoder.norm_name().to_owned();
    let norm = variable(&name)?;
    let (mut dx, d_norm) = differentiate(&x, &loss.d_hidden, &[(name, norm)], |local, x| decoder.norm(local, x))?;
    deliver(d_norm, on_gradient)?;

    for (index, x) in inputs.iter().enumerate().rev() {
        let parameter = |name: String| variable(&name).map(|var| (name, var));
        let parameters = decoder.layer_names(index).into_iter().map(parameter).collect::<Result<Vec<_>>>()?;
        if tokens.is_empty() {
            // The recomputation and backward of what this rank does for others.
            let y = decoder.take_part(&local(&parameters), index, attend)?;
            deliver(collect(&mut y.sum_all()?.backward()?, &parameters)?, on_gradient)?;
            continue;
        }
        let (d_input, gradients) =
            differentiate(x, &dx, &parameters, |local, x| decoder.layer(local, index, x, attend))?;
        dx = d_input;
        deliver(gradients, on_gradient)?;
    }

    let embedding = decoder.get(weights, decoder.embedding_name())?;
    let mut gradient = scatter(&decoder.embedding_scaled(dx)?, tokens, embedding.dims())?;
    if tied {
        gradient = (gradient + loss.d_head)?;
    }
    on_gradient(decoder.embedding_name(), gradient)?;
    Ok(loss.nll_sum)
}

/// Gradients of `sum(dy * f(parameters, x))`: of x, and of each parameter by name.
fn differentiate(
    x: &Tensor,
    dy: &Tensor,
    parameters: &[(String, Var)],
    f: impl FnOnce(&Weights, &Tensor) -> Result<Tensor>,
) -> Result<(Tensor, Vec<(String, Tensor)>)> {
    if x.dim(0)? == 0 {
        let none = parameters.iter().map(|(name, var)| Ok((name.clone(), var.zeros_like()?)));
        return Ok((x.clone(), none.collect::<Result<_>>()?));
    }
    let input = Var::from_tensor(x)?;
    // Candle's backward starts from ones, so the incoming gradient enters as a factor.
    let y = f(&local(parameters), input.as_tensor())?;
    let mut store = (y * dy.detach())?.sum_all()?.backward()?;
    let dx = store.remove(input.as_tensor()).map_or_else(|| x.zeros_like(), Ok)?.detach();
    Ok((dx, collect(&mut store, parameters)?))
}

fn local(parameters: &[(String, Var)]) -> Weights {
    parameters.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect()
}

/// The gradient of each parameter: zeros of those that took no part.
fn collect(store: &mut GradStore, parameters: &[(String, Var)]) -> Result<Vec<(String, Tensor)>> {
    let gradient = |(name, var): &(String, Var)| {
        let gradient = store.remove(var.as_tensor()).map_or_else(|| var.zeros_like(), Ok)?;
        Ok((name.clone(), gradient.detach()))
    };
    parameters.iter().map(gradient).collect()
}

fn deliver(gradients: Vec<(String, Tensor)>, to: &mut dyn FnMut(&str, Tensor) -> Result<()>) -> Result<()> {
    gradients.into_iter().try_for_each(|(name, gradient)| to(&name, gradient))
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
