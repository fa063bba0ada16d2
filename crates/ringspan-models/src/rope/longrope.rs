//! LongRoPE (Ding et al., 2024, arXiv:2402.13753): each pair is scaled by a factor of its own; there is one set of factors for
//! short texts and one for long texts.

use super::Parameters;
use crate::config::Config;
use crate::error::{Error, Result};
use ringspan_candle::layers::{ByLength, RotaryEmbedding};

/// Scales the plain frequencies of `rope`. Long texts are those with more positions than the original context.
///
/// # Errors
/// Factors that are missing, too few, too many or not above 0.
pub(super) fn scale(rope: &mut RotaryEmbedding, config: &Config, parameters: &Parameters) -> Result<()> {
    let pairs = rope.frequencies.len();
    let scaled = |name: &str, factors: &Option<Vec<f64>>| {
        let refuse = |problem: String| Err(Error::Config(format!("rope type longrope needs {name}: {problem}")));
        let Some(factors) = factors else { return refuse("it is missing".into()) };
        if factors.len() != pairs {
            return refuse(format!("a factor for each of {pairs} pairs, given {}", factors.len()));
        }
        if let Some(factor) = factors.iter().find(|factor| !(**factor > 0.0 && factor.is_finite())) {
            return refuse(format!("each above 0, given {factor}"));
        }
        // Transformers computes this in f32.
        let divided = |(frequency, factor): (&f64, &f64)| f64::from((1.0 / frequency) as f32 * *factor as f32).recip();
        Ok(rope.frequencies.iter().zip(factors).map(divided).collect::<Vec<f64>>())
    };
    let short = scaled("short_factor", &parameters.short_factor)?;
    let frequencies = scaled("long_factor", &parameters.long_factor)?;
    let original = super::original_positions(config, parameters)?;
    let quotient = || config.max_position_embeddings.map(|positions| positions as f64 / original);
    let factor = parameters.need("factor", parameters.factor.or_else(quotient))?;
    rope.scale = match parameters.attention_factor {
        Some(scale) => parameters.need("attention_factor", Some(scale))?,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / original.ln()).sqrt(),
    };
    rope.frequencies = short;
    rope.by_length = Some(ByLength::Long { frequencies, original });
    Ok(())
}
