//! Angles of the rotary embedding, and how they are stretched for longer contexts.

mod yarn;

use crate::config::Config;
use crate::error::{Error, Result};
use ringspan_candle::rope::Rotation;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::f64::consts::PI;

/// Ways to stretch that are here.
const KINDS: &str = "default, linear, dynamic, llama3, yarn";

/// Rotary embedding as `config.json` says it: its base, and how it is stretched.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
pub(crate) struct Parameters {
    rope_type: Option<String>,
    /// The older name of `rope_type`; some files have both.
    r#type: Option<String>,
    pub(crate) rope_theta: Option<f64>,
    pub(crate) factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    pub(crate) original_max_position_embeddings: Option<f64>,
    partial_rotary_factor: Option<f64>,
    attention_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
    #[serde(flatten)]
    pub(crate) others: BTreeMap<String, serde_json::Value>,
}

impl Parameters {
    pub(crate) fn kind(&self) -> &str {
        self.rope_type.as_deref().or(self.r#type.as_deref()).unwrap_or("default")
    }

    /// A number above 0 that the kind cannot do without.
    fn need(&self, name: &str, value: Option<f64>) -> Result<f64> {
        value
            .filter(|value| *value > 0.0 && value.is_finite())
            .ok_or_else(|| Error::Config(format!("rope type {} needs a positive {name}, given {value:?}", self.kind())))
    }

    /// Positions the model was trained with before it was stretched.
    fn original(&self, config: &Config) -> Result<f64> {
        let trained = config.max_position_embeddings.map(|positions| positions as f64);
        let outside = config.original_max_position_embeddings;
        let original = outside.or(self.original_max_position_embeddings).or(trained);
        self.need("original_max_position_embeddings", original)
    }
}

/// A rotary embedding of heads of width D.
#[derive(Debug, Clone)]
pub(crate) struct Rope {
    /// Radians per position of each pair of elements, `[D / 2]`.
    frequencies: Vec<f64>,
    /// Factor on cosines and sines, so its square is one on the scores.
    scale: f64,
    dynamic: Option<Dynamic>,
}

/// A base that grows with the length (NTK-aware scaling; bloc97 and emozilla, 2023).
#[derive(Debug, Clone, Copy)]
struct Dynamic {
    theta: f64,
    factor: f64,
    /// Positions the model was trained with.
    trained: f64,
}

impl Rope {
    /// `theta` is the base if the configuration names none.
    ///
    /// # Errors
    /// An unknown kind, and numbers that it lacks or cannot use.
    pub(crate) fn new(config: &Config, parameters: Option<&Parameters>, theta: f64) -> Result<Self> {
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
        if let Some(part) = parameters.partial_rotary_factor.or(config.partial_rotary_factor)
            && part != 1.0
        {
            return refuse(format!("partial_rotary_factor is {part}: possible is 1, all of a head turns"));
        }
        let dim = config.head_dim();
        let factor = || parameters.need("factor", parameters.factor);
        let mut rope = Self { frequencies: plain(theta, dim), scale: 1.0, dynamic: None };
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
                rope.dynamic = Some(Dynamic { theta, factor: factor()?, trained });
            }
            "llama3" => rope.stretch_llama3(config, parameters)?,
            "yarn" => yarn::stretch(&mut rope, config, parameters, theta)?,
            "longrope" => {
                return refuse(format!(
                    "rope type 'longrope' has a factor for each pair, for short and for long texts, which is not \
                     here: possible are {KINDS}"
                ));
            }
            other => return refuse(format!("rope type '{other}' is unknown: possible are {KINDS}")),
        }
        Ok(rope)
    }

    /// Radians per position of each pair, `[D / 2]`, of texts that are not too long for a dynamic base.
    pub(crate) fn frequencies(&self) -> &[f64] {
        &self.frequencies
    }

    /// Cosines and sines of tokens at `positions` in a batch whose longest document has `length` tokens.
    ///
    /// Only a dynamic base asks for the length. It is one number for the whole batch and for all ranks, because a query
    /// meets keys that other ranks have turned. So a token's angles depend on the longest document of its batch, as
    /// they do at Hugging Face; and a text that grows is turned for its final length from the start, while Hugging Face
    /// leaves cached keys at the base of the length they were made with.
    pub(crate) fn rotation(&self, positions: &[usize], length: usize) -> Rotation {
        match self.dynamic {
            Some(Dynamic { theta, factor, trained }) if length as f64 > trained => {
                let dim = 2.0 * self.frequencies.len() as f64;
                let growth = factor * length as f64 / trained - (factor - 1.0);
                let frequencies = plain(theta * growth.powf(dim / (dim - 2.0)), dim as usize);
                Rotation::new(positions, &frequencies, self.scale)
            }
            _ => Rotation::new(positions, &self.frequencies, self.scale),
        }
    }

    /// Llama 3.1: waves longer than the original context are stretched, short ones kept, those between blended.
    fn stretch_llama3(&mut self, config: &Config, parameters: &Parameters) -> Result<()> {
        let factor = parameters.need("factor", parameters.factor)?;
        let low = parameters.need("low_freq_factor", parameters.low_freq_factor)?;
        let high = parameters.need("high_freq_factor", parameters.high_freq_factor)?;
        if high <= low {
            return Err(Error::Config(format!(
                "rope type llama3 needs high_freq_factor above low_freq_factor, given {high} and {low}"
            )));
        }
        let length = parameters.original(config)?;
        for frequency in &mut self.frequencies {
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
}

/// `theta^(-2i / D)`. Hugging Face computes these in f32; what a model was trained with is the rounded value.
fn plain(theta: f64, dim: usize) -> Vec<f64> {
    (0..dim / 2).map(|i| f64::from(1.0 / (theta as f32).powf((2 * i) as f32 / dim as f32))).collect()
}

#[cfg(test)]
mod test;
