//! Angles of the rotary embedding, and how they are stretched for longer contexts.

use crate::config::Config;
use crate::error::{Error, Result};
use std::f64::consts::PI;

/// Radians per position of each pair of elements, `[D / 2]`.
pub(crate) fn inverse_frequencies(config: &Config) -> Result<Vec<f64>> {
    let (dim, theta) = (config.head_dim(), config.rope_theta());
    // Hugging Face computes these in f32; what the model was trained with is the rounded value.
    let base = |i: usize| 1.0 / (theta as f32).powf((2 * i) as f32 / dim as f32);
    let plain = (0..dim / 2).map(|i| f64::from(base(i)));
    let Some(rope) = config.rope() else { return Ok(plain.collect()) };
    match rope.rope_type.as_deref() {
        None | Some("default") => Ok(plain.collect()),
        Some("llama3") => {
            let need = |name: &str, value: Option<f64>| {
                value.filter(|value| *value > 0.0).ok_or_else(|| {
                    Error::Config(format!("rope type llama3 needs a positive {name}, given {value:?}"))
                })
            };
            let factor = need("factor", rope.factor)?;
            let low = need("low_freq_factor", rope.low_freq_factor)?;
            let high = need("high_freq_factor", rope.high_freq_factor)?;
            let length = need("original_max_position_embeddings", rope.original_max_position_embeddings)?;
            Ok(plain.map(|frequency| stretch_llama3(frequency, factor, low, high, length)).collect())
        }
        Some(other) => {
            Err(Error::Config(format!("rope type '{other}' is unknown: possible are default, llama3")))
        }
    }
}

/// Llama 3.1: waves longer than the original context are stretched by `factor`, short ones kept, those between blended.
fn stretch_llama3(frequency: f64, factor: f64, low: f64, high: f64, length: f64) -> f64 {
    let wave = 2.0 * PI / frequency;
    if wave < length / high {
        return frequency;
    }
    if wave > length / low {
        return frequency / factor;
    }
    let smooth = (length / wave - low) / (high - low);
    (1.0 - smooth) * frequency / factor + smooth * frequency
}
