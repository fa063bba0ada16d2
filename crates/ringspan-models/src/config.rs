//! `config.json` of a Hugging Face model, as far as the Llama family needs it.

use crate::error::{Error, Result};
use ringspan::Mask;
use serde::Deserialize;
use std::collections::BTreeMap;

const MODELS: &str = "llama, qwen2, qwen3, mistral";

/// A model's sizes and switches, by Hugging Face's names. Keys that this crate does not need are passed over.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Config {
    /// Which of the family.
    pub model_type: String,
    /// Tokens V.
    pub vocab_size: usize,
    /// Width C of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Query heads H.
    pub num_attention_heads: usize,
    /// Key-value heads G; as many as query heads if absent.
    #[serde(default)]
    num_key_value_heads: Option<usize>,
    #[serde(default)]
    head_dim: Option<usize>,
    /// Epsilon of the norms.
    #[serde(default = "default_eps")]
    pub rms_norm_eps: f64,
    #[serde(default)]
    hidden_act: Option<String>,
    #[serde(default)]
    rope_theta: Option<f64>,
    #[serde(default)]
    rope_scaling: Option<Rope>,
    #[serde(default)]
    rope_parameters: Option<Rope>,
    #[serde(default)]
    partial_rotary_factor: Option<f64>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    /// Whether the embedding is the output head, too.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Absent and null are not the same to Hugging Face: absent is 4096.
    #[serde(default = "default_window")]
    sliding_window: Option<usize>,
    #[serde(default)]
    use_sliding_window: Option<bool>,
    #[serde(default)]
    max_window_layers: Option<usize>,
    #[serde(default)]
    layer_types: Option<Vec<String>>,
}

/// Rotary embedding: its base, and how it is stretched.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Rope {
    rope_type: Option<String>,
    /// The older name of `rope_type`; some files have both.
    r#type: Option<String>,
    pub(crate) rope_theta: Option<f64>,
    pub(crate) factor: Option<f64>,
    pub(crate) low_freq_factor: Option<f64>,
    pub(crate) high_freq_factor: Option<f64>,
    pub(crate) original_max_position_embeddings: Option<f64>,
    partial_rotary_factor: Option<f64>,
    #[serde(flatten)]
    others: BTreeMap<String, serde_json::Value>,
}

impl Rope {
    pub(crate) fn kind(&self) -> Option<&str> {
        self.rope_type.as_deref().or(self.r#type.as_deref())
    }
}

/// The default of Mistral, Qwen2 and Qwen3 when the key is absent.
fn default_window() -> Option<usize> {
    Some(4096)
}

fn default_eps() -> f64 {
    1e-6
}

impl Config {
    /// Refuses what this crate cannot compute, and sizes that contradict each other.
    ///
    /// # Errors
    /// The first thing found, with what is possible.
    pub fn check(&self) -> Result<()> {
        let refuse = |problem: String| Err(Error::Config(problem));
        if !MODELS.split(", ").any(|name| name == self.model_type) {
            return refuse(format!("model_type '{}' is unknown: possible are {MODELS}", self.model_type));
        }
        if let Some(act) = self.hidden_act.as_deref().filter(|act| *act != "silu") {
            return refuse(format!("hidden_act '{act}' is unknown: possible is silu"));
        }
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads()),
            ("head_dim", self.head_dim()),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return refuse(format!("{name} is 0; the least is 1"));
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads()) {
            return refuse(format!(
                "num_attention_heads {} is not a multiple of num_key_value_heads {}",
                self.num_attention_heads,
                self.num_key_value_heads()
            ));
        }
        if self.head_dim.is_none()
            && self.model_type != "qwen3"
            && !self.hidden_size.is_multiple_of(self.num_attention_heads)
        {
            return refuse(format!(
                "hidden_size {} does not divide by num_attention_heads {}, and there is no head_dim",
                self.hidden_size, self.num_attention_heads
            ));
        }
        if !self.head_dim().is_multiple_of(2) {
            return refuse(format!("head_dim {} is odd; rotary embedding turns pairs", self.head_dim()));
        }
        if !(self.rms_norm_eps >= 0.0 && self.rms_norm_eps.is_finite()) {
            return refuse(format!("rms_norm_eps is {}; the least is 0", self.rms_norm_eps));
        }
        if let Some(types) = self.layer_types.as_ref().filter(|_| self.is_qwen()) {
            if types.len() != self.num_hidden_layers {
                return refuse(format!("{} layer_types for {} layers", types.len(), self.num_hidden_layers));
            }
            let known = ["full_attention", "sliding_attention"];
            if let Some(unknown) = types.iter().find(|kind| !known.contains(&kind.as_str())) {
                return refuse(format!("layer type '{unknown}' is unknown: possible are {}", known.join(", ")));
            }
            if let Some(layer) = types.iter().position(|kind| kind == known[1]).filter(|_| self.window().is_none()) {
                return refuse(format!(
                    "layer {layer} is {}, which needs use_sliding_window true and a sliding_window",
                    known[1]
                ));
            }
        }
        if self.window() == Some(0) {
            return refuse("sliding_window is 0; the least is 1, null is none".into());
        }
        self.check_rope()?;
        crate::rope::inverse_frequencies(self).map(|_| ())
    }

    fn check_rope(&self) -> Result<()> {
        let theta = self.rope_theta();
        if !(theta > 0.0 && theta.is_finite()) {
            return Err(Error::Config(format!("rope_theta is {theta}; it must be above 0")));
        }
        let rope = self.rope();
        if let Some((kind, _)) = rope.and_then(|rope| rope.others.iter().find(|(_, value)| value.is_object())) {
            return Err(Error::Config(format!(
                "rope parameters for '{kind}' alone: possible are the same for all layers"
            )));
        }
        match rope.and_then(|rope| rope.partial_rotary_factor).or(self.partial_rotary_factor) {
            Some(part) if part != 1.0 => {
                Err(Error::Config(format!("partial_rotary_factor is {part}: possible is 1, all of a head turns")))
            }
            _ => Ok(()),
        }
    }

    fn is_qwen(&self) -> bool {
        matches!(self.model_type.as_str(), "qwen2" | "qwen3")
    }

    /// Key-value heads G.
    pub fn num_key_value_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Width D of a head.
    pub fn head_dim(&self) -> usize {
        let default = || match self.model_type.as_str() {
            "qwen3" => 128,
            _ => self.hidden_size / self.num_attention_heads.max(1),
        };
        self.head_dim.unwrap_or_else(default)
    }

    /// Base of the rotary embedding.
    pub(crate) fn rope_theta(&self) -> f64 {
        self.rope_theta.or_else(|| self.rope().and_then(|rope| rope.rope_theta)).unwrap_or(10_000.0)
    }

    pub(crate) fn rope(&self) -> Option<&Rope> {
        self.rope_parameters.as_ref().or(self.rope_scaling.as_ref())
    }

    /// Whether the projections to queries, keys and values have biases.
    pub(crate) fn qkv_bias(&self) -> bool {
        self.model_type == "qwen2" || self.output_bias()
    }

    /// Whether the projection from the heads has a bias.
    pub(crate) fn output_bias(&self) -> bool {
        matches!(self.model_type.as_str(), "llama" | "qwen3") && self.attention_bias
    }

    /// Whether the feed-forward layers have biases.
    pub(crate) fn mlp_bias(&self) -> bool {
        self.model_type == "llama" && self.mlp_bias
    }

    /// Whether queries and keys are normed, head by head.
    pub(crate) fn qk_norm(&self) -> bool {
        self.model_type == "qwen3"
    }

    /// The window of the layers that slide.
    fn window(&self) -> Option<usize> {
        match self.model_type.as_str() {
            "mistral" => self.sliding_window,
            "qwen2" | "qwen3" => self.sliding_window.filter(|_| self.use_sliding_window == Some(true)),
            _ => None,
        }
    }

    /// What a token of a layer sees: all before it, or the last `sliding_window` tokens with itself.
    pub fn mask(&self, layer: usize) -> Mask {
        let slides = match &self.layer_types {
            _ if !self.is_qwen() => true,
            Some(types) => types.get(layer).is_some_and(|kind| kind == "sliding_attention"),
            None => layer >= self.max_window_layers.unwrap_or(28),
        };
        match self.window().filter(|_| slides) {
            Some(window) => Mask::causal().window(Some(window.saturating_sub(1)), None),
            None => Mask::causal(),
        }
    }
}

#[cfg(test)]
mod test;
