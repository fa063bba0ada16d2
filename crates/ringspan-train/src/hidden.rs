//! The forward pass without gradients.

use crate::{error::Result, setup::model_error};
use candle_core::Tensor;
use ringspan_candle::Attend;
use ringspan_models::{Decoder, Weights};

/// The last hidden states [T, C] of this rank's tokens, normed, ready for the head.
///
/// # Errors
/// Failures of the model or of other ranks.
pub fn hidden(decoder: &Decoder, weights: &Weights, tokens: &[u32], attend: &dyn Attend) -> Result<Tensor> {
    let mut x = decoder.embed(weights, tokens).map_err(model_error)?;
    for index in 0..decoder.config().num_hidden_layers {
        x = decoder.layer(weights, index, &x, attend).map_err(model_error)?;
    }
    decoder.norm(weights, &x).map_err(model_error)
}
