//! YaRN (Peng et al., 2023, arXiv:2309.00071): slow pairs are scaled, fast ones kept, and attention scores sharpened.

use super::Parameters;
use crate::config::Config;
use crate::error::{Error, Result};
use ringspan_candle::layers::RotaryEmbedding;
use std::f64::consts::PI;

/// Scales the plain frequencies of `rope`, whose base is `theta`.
///
/// # Errors
/// Numbers that are missing or contradict each other.
pub(super) fn scale(rope: &mut RotaryEmbedding, config: &Config, parameters: &Parameters, theta: f64) -> Result<()> {
    let original = super::original_positions(config, parameters)?;
    // Some files give the context before and after scaling instead of the factor.
    let quotient = || config.max_position_embeddings.map(|positions| positions as f64 / original);
    let factor = parameters.need("factor", parameters.factor.or_else(quotient))?;
    // A value of 0 stands for the default, as at Hugging Face.
    let given = |value: Option<f64>, default: f64| value.filter(|value| *value != 0.0).unwrap_or(default);
    let fast = parameters.need("beta_fast", Some(given(parameters.beta_fast, 32.0)))?;
    let slow = parameters.need("beta_slow", Some(given(parameters.beta_slow, 1.0)))?;
    if fast < slow {
        return Err(Error::Config(format!("rope type yarn needs beta_fast {fast} to be at least beta_slow {slow}")));
    }
    rope.scale = match (parameters.attention_factor, parameters.mscale, parameters.mscale_all_dim) {
        (Some(scale), ..) => parameters.need("attention_factor", Some(scale))?,
        (None, Some(one), Some(all)) if one != 0.0 && all != 0.0 => sharpening(factor, one) / sharpening(factor, all),
        _ => sharpening(factor, 1.0),
    };
    let pairs = rope.frequencies.len();
    let dim = 2.0 * pairs as f64;
    // The (fractional) index of the pair that rotates `turns` times within the original context.
    let pair = |turns: f64| dim * (original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (pair(fast), pair(slow));
    if parameters.truncate.unwrap_or(true) {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim - 1.0));
    if low == high {
        high += 0.001;
    }
    for (i, frequency) in rope.frequencies.iter_mut().enumerate() {
        let scaled = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        *frequency = *frequency / factor * scaled + *frequency * (1.0 - scaled);
    }
    Ok(())
}

/// The factor on attention scores of models such as DeepSeek, which sharpen them in addition to `attention_factor`.
///
/// # Errors
/// A factor that is missing.
pub(crate) fn on_scores(config: &Config) -> Result<f64> {
    let Some(parameters) = config.rope().filter(|parameters| parameters.kind() != "default") else { return Ok(1.0) };
    match parameters.mscale_all_dim.filter(|strength| *strength != 0.0) {
        Some(strength) => Ok(sharpening(parameters.need("factor", parameters.factor)?, strength).powi(2)),
        None => Ok(1.0),
    }
}

/// A longer context makes attention flatter; this factor on both queries and keys compensates for it.
fn sharpening(factor: f64, strength: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * strength * factor.ln() + 1.0 }
}
