//! The forward pass without gradients, layer by layer.

use candle_core::Tensor;
use ringspan_candle::model::{UnitWeights, constant};
use ringspan_candle::{Attend, Unit};
use ringspan_models::Decoder;

/// The hidden states [T, C] of this rank's tokens after the last layer, before the last norm; in a tensor-parallel group, only
/// this rank's rows of them.
///
/// # Errors
/// Failures of the model or of other ranks.
pub fn hidden_states(
    decoder: &Decoder,
    weights: &dyn UnitWeights,
    tokens: &[u32],
    attend: &dyn Attend,
) -> ringspan_models::Result<Tensor> {
    hidden_states_prefetching(Unit::Head, decoder, weights, tokens, attend)
}

/// Like [`hidden_states`], but after the last layer it prefetches the parameters of `next` instead of the head's.
pub(crate) fn hidden_states_prefetching(
    next: Unit,
    decoder: &Decoder,
    weights: &dyn UnitWeights,
    tokens: &[u32],
    attend: &dyn Attend,
) -> ringspan_models::Result<Tensor> {
    let layers = decoder.config().num_hidden_layers;
    let unit_weights = |unit| weights.unit(unit, decoder.parameters(unit)).map(constant);
    let mut x = decoder.embed(&unit_weights(Unit::Embedding)?, tokens, attend)?;
    for index in 0..layers {
        let layer = unit_weights(Unit::Layer(index))?;
        weights.prefetch(if index + 1 < layers { Unit::Layer(index + 1) } else { next })?;
        x = decoder.layer(&layer, index, &x, attend)?;
    }
    Ok(x)
}
