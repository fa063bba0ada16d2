//! The backward pass of one layer.

use super::{Graph, variable};
use crate::activation_store::ActivationStore;
use crate::layers::ForwardPass;
use crate::lora::Adapters;
use crate::model::{Layer, StoredWeights};
use candle_core::{Result, Tensor};

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
    let pass = |weights: &StoredWeights, f: &dyn Fn(&ForwardPass) -> Result<Tensor>| {
        f(&ForwardPass::storing(weights, adapters, store))
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
