//! Gradients layer by layer, with recomputation: memory for one layer's graph, and what [`Recompute`] keeps of each.

use crate::decoder::{Decoder, Weights};
use crate::error::Result;
use crate::recompute::{Graph, Keeper, Recompute};
use candle_core::{Device, Tensor, Var};
use ringspan_candle::{Attend, loss};

/// Negative log-likelihood, summed over this rank's tokens with a target, and the gradient of `scale` times it.
///
/// `on_gradient` gets every parameter's gradient once, as soon as it is known, in an order that depends on the model
/// only: head (unless tied), last norm, layers from the last to the first, embedding. A rank without tokens takes part
/// in every attention, forward and backward, and yields zeros. All ranks must recompute alike.
///
/// # Errors
/// Tokens or targets outside the vocabulary, failures of other ranks, and what `on_gradient` returns.
#[expect(clippy::too_many_arguments, reason = "what a pass reads, how it computes, and who gets the gradients")]
pub fn loss_and_gradients(
    decoder: &Decoder,
    weights: &Weights,
    tokens: &[u32],
    targets: &[u32],
    scale: f32,
    recompute: Recompute,
    attend: &dyn Attend,
    on_gradient: &mut dyn FnMut(&str, Tensor) -> Result<()>,
) -> Result<f64> {
    let layers = decoder.config().num_hidden_layers;
    let variable = |name: &str| -> Result<Var> { Ok(Var::from_tensor(decoder.get(weights, name)?)?) };
    let keeper = Keeper::new(attend);
    let attend = if recompute == Recompute::Full { attend } else { &keeper };
    let parameters = |index: usize| -> Result<Vec<(String, Var)>> {
        decoder.layer_names(index).into_iter().map(|name| variable(&name).map(|var| (name, var))).collect()
    };
    let graph =
        |index: usize, x: &Tensor| Graph::new(x, parameters(index)?, |local, x| decoder.layer(local, index, x, attend));
    let mut kept = Vec::with_capacity(layers);
    let mut x = decoder.embed(weights, tokens)?;
    for index in 0..layers {
        if recompute == Recompute::Nothing && !tokens.is_empty() {
            let layer = graph(index, &x)?;
            x = layer.output();
            kept.push(Layer::Graph(layer));
        } else {
            let next = decoder.layer(weights, index, &x, attend)?;
            kept.push(Layer::Input(std::mem::replace(&mut x, next)));
        }
    }

    let hidden = decoder.norm(weights, &x)?;
    let loss = loss::head_loss(&hidden, &decoder.head(weights)?, targets, scale)?;
    let tied = decoder.config().tie_word_embeddings;
    if !tied {
        on_gradient(decoder.head_name(), loss.d_head.clone())?;
    }
    let name = decoder.norm_name().to_owned();
    let norm = variable(&name)?;
    let last = Graph::new(&x, vec![(name, norm)], |local, x| decoder.norm(local, x))?;
    let (mut dx, d_norm) = last.backward(&loss.d_hidden)?;
    deliver(d_norm, on_gradient)?;

    for (index, layer) in kept.into_iter().enumerate().rev() {
        if tokens.is_empty() {
            take_part(decoder, index, attend)?;
            for name in decoder.layer_names(index) {
                on_gradient(&name, decoder.get(weights, &name)?.zeros_like()?)?;
            }
            continue;
        }
        let layer = match layer {
            Layer::Graph(graph) => graph,
            Layer::Input(x) => graph(index, &x)?,
        };
        let (d_input, gradients) = layer.backward(&dx)?;
        dx = d_input;
        deliver(gradients, on_gradient)?;
    }

    let embedding = decoder.get(weights, decoder.embedding_name())?;
    let mut gradient = scatter(&dx, tokens, embedding.dims())?;
    if tied {
        gradient = (gradient + loss.d_head)?;
    }
    on_gradient(decoder.embedding_name(), gradient)?;
    Ok(loss.nll_sum)
}

/// What a layer's forward pass leaves for its backward.
enum Layer {
    /// The input `[T, C]`.
    Input(Tensor),
    Graph(Graph),
}

fn deliver(gradients: Vec<(String, Tensor)>, to: &mut dyn FnMut(&str, Tensor) -> Result<()>) -> Result<()> {
    gradients.into_iter().try_for_each(|(name, gradient)| to(&name, gradient))
}

/// The recomputation and backward of a layer's attention on a rank without tokens.
fn take_part(decoder: &Decoder, index: usize, attend: &dyn Attend) -> Result<()> {
    let [q, k, v] = decoder.no_tokens()?;
    let y = attend.attention(index, &q, &k, &v, &decoder.config().mask(index), decoder.scale())?;
    y.sum_all()?.backward()?;
    Ok(())
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
