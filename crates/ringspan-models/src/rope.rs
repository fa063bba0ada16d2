//! Frequencies of the rotary embedding, and how they are scaled for longer contexts.

mod longrope;
pub(crate) mod yarn;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::rope_parameters::Parameters;
use ringspan_candle::layers::{ByLength, RotaryEmbedding, inverse_frequencies};
use std::f64::consts::PI;

/// The implemented kinds of scaling.
const KINDS: &str = "default, linear, dynamic, llama3, yarn, longrope";

/// Number of positions the model was trained with before its rotary embedding was scaled.
fn original_positions(config: &Config, parameters: &Parameters) -> Result<f64> {
    let trained = config.max_position_embeddings.map(|positions| positions as f64);
    let outside = config.original_max_position_embeddings;
    let original = outside.or(parameters.original_max_position_embeddings).or(trained);
    parameters.need("original_max_position_embeddings", original)
}

/// The rotary embedding that all layers of a model share.
///
/// # Errors
/// As for [`new`].
pub(crate) fn of_all_layers(config: &Config) -> Result<RotaryEmbedding> {
    new(config, config.rope(), 10_000.0)
}

/// A rotary embedding of whole heads; `theta` is the base if the configuration names none.
///
/// # Errors
/// An unknown kind of scaling, and numbers that it lacks or cannot use.
pub(crate) fn new(config: &Config, parameters: Option<&Parameters>, theta: f64) -> Result<RotaryEmbedding> {
    if let Some(part) = rotated_share(config, parameters).filter(|part| *part != 1.0) {
        return Err(Error::Config(format!("partial_rotary_factor is {part}: possible is 1, all of a head turns")));
    }
    with_width(config, parameters, theta, config.head_dim())
}

/// A rotary embedding that rotates a share of each head: `part`, if the configuration names none.
///
/// # Errors
/// As for [`new`]; a share that is not an even number of elements.
pub(crate) fn partial(config: &Config, theta: f64, part: f64) -> Result<RotaryEmbedding> {
    let (part, dim) = (rotated_share(config, config.rope()).unwrap_or(part), config.head_dim());
    let turned = (dim as f64 * part) as usize;
    if !(part <= 1.0 && turned >= 2 && turned.is_multiple_of(2)) {
        let problem =
            format!("partial_rotary_factor is {part}: {turned} of the {dim} elements of a head make no pairs");
        return Err(Error::Config(problem));
    }
    with_width(config, config.rope(), theta, turned)
}

/// The share of a head that is rotated, if the configuration gives one.
fn rotated_share(config: &Config, parameters: Option<&Parameters>) -> Option<f64> {
    parameters.and_then(|parameters| parameters.partial_rotary_factor).or(config.partial_rotary_factor)
}

/// A rotary embedding of the first `dim` elements of a head.
///
/// # Errors
/// As for [`new`].
fn with_width(config: &Config, parameters: Option<&Parameters>, theta: f64, dim: usize) -> Result<RotaryEmbedding> {
    let refuse = |problem: String| Err(Error::Config(problem));
    let absent = Parameters::default();
    let parameters = parameters.unwrap_or(&absent);
    let theta = parameters.rope_theta.or(config.rope_theta).unwrap_or(theta);
    if !(theta > 1.0 && theta.is_finite()) {
        return refuse(format!("rope_theta is {theta}; it must be above 1"));
    }
    if let Some((kind, _)) = parameters.others.iter().find(|(_, value)| value.is_object()) {
        return refuse(format!("rope parameters for '{kind}' alone: possible are the same for all layers"));
    }
    let factor = || parameters.need("factor", parameters.factor);
    let frequencies = inverse_frequencies(theta, dim);
    let mut rope = RotaryEmbedding { id: 0, frequencies, interleaved: false, scale: 1.0, by_length: None };
    match parameters.kind() {
        "default" => {}
        "linear" => {
            let factor = factor()? as f32;
            rope.frequencies.iter_mut().for_each(|f| *f = f64::from(*f as f32 / factor));
        }
        "dynamic" => {
            let positions = config.max_position_embeddings.map(|positions| positions as f64);
            let trained = parameters.need("max_position_embeddings", positions)?;
            if dim <= 2 {
                return refuse(format!("rope type dynamic needs heads wider than 2, not {dim}"));
            }
            rope.by_length = Some(ByLength::DynamicBase { theta, factor: factor()?, trained });
        }
        "llama3" => scale_llama3(&mut rope, config, parameters)?,
        "yarn" => yarn::scale(&mut rope, config, parameters, theta)?,
        "longrope" => longrope::scale(&mut rope, config, parameters)?,
        other => return refuse(format!("rope type '{other}' is unknown: possible are {KINDS}")),
    }
    Ok(rope)
}

/// Scaling of Llama 3.1: divides the frequencies of wavelengths beyond the original context, keeps short wavelengths, and
/// blends between them.
fn scale_llama3(rope: &mut RotaryEmbedding, config: &Config, parameters: &Parameters) -> Result<()> {
    let factor = parameters.need("factor", parameters.factor)?;
    let low = parameters.need("low_freq_factor", parameters.low_freq_factor)?;
    let high = parameters.need("high_freq_factor", parameters.high_freq_factor)?;
    if high <= low {
        return Err(Error::Config(format!(
            "rope type llama3 needs high_freq_factor above low_freq_factor, given {high} and {low}"
        )));
    }
    let length = original_positions(config, parameters)?;
    for frequency in &mut rope.frequencies {
        let wave = 2.0 * PI / *frequency;
        if wave > length / low {
            *frequency /= factor;
        } else if wave >= length / high {
            let smooth = (length / wave - low) / (high - low);
            *frequency = (1.0 - smooth) * *frequency / factor + smooth * *frequency;
        }
    }
    Ok(())
}

#[cfg(test)]
mod test;
