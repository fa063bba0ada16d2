//! The keys of a Hugging Face model's `config.json` that the models here need.

use crate::error::{Error, Result};
use crate::rope_parameters::Parameters;
use ringspan::Mask;
use ringspan_candle::shard::HeadCounts;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// A model's sizes and switches, by their names at Hugging Face. Keys that no model here reads are ignored.
///
/// ```
/// use ringspan_models::Config;
///
/// let config: Config = serde_json::from_str(
///     r#"{
///         "model_type": "llama", "vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
///         "num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5
///     }"#,
/// )?;
/// assert_eq!((config.num_key_value_heads(), config.head_dim()), (4, 16));
/// # Ok::<_, serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(remote = "Self")]
pub struct Config {
    /// The name of the architecture.
    pub model_type: String,
    /// Number of tokens V in the vocabulary.
    pub vocab_size: usize,
    /// Width C of the residual stream.
    pub hidden_size: usize,
    /// Width of the dense feed-forward layers.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Number of query heads H.
    pub num_attention_heads: usize,
    /// Number of key-value heads G; as many as query heads if absent.
    #[serde(default)]
    num_key_value_heads: Option<usize>,
    #[serde(default)]
    head_dim: Option<usize>,
    /// Epsilon of the RMS norms.
    #[serde(default = "default_eps")]
    pub rms_norm_eps: f64,
    #[serde(default)]
    pub(crate) hidden_act: Option<String>,
    /// Number of positions that the model is made for.
    #[serde(default)]
    pub max_position_embeddings: Option<usize>,
    #[serde(default)]
    pub(crate) original_max_position_embeddings: Option<f64>,
    #[serde(default)]
    pub(crate) rope_theta: Option<f64>,
    #[serde(default)]
    rope_scaling: Option<Parameters>,
    #[serde(default)]
    rope_parameters: Option<Parameters>,
    #[serde(default)]
    pub(crate) partial_rotary_factor: Option<f64>,
    #[serde(default)]
    pub(crate) attention_bias: bool,
    #[serde(default)]
    pub(crate) mlp_bias: bool,
    /// Whether the output head uses the embedding's matrix.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Hugging Face tells an absent key, which means 4096, from null, which means no window.
    #[serde(default = "default_window")]
    pub(crate) sliding_window: Option<usize>,
    #[serde(default)]
    pub(crate) layer_types: Option<Vec<String>>,
    #[serde(default)]
    num_experts: Option<usize>,
    #[serde(default)]
    num_local_experts: Option<usize>,
    #[serde(default)]
    attention_dropout: Option<f64>,
    #[serde(default)]
    initializer_range: Option<f64>,
    #[serde(default)]
    output_router_logits: Option<bool>,
    #[serde(default)]
    router_aux_loss_coef: Option<f64>,
    /// The keys that only this model's family reads.
    #[serde(flatten)]
    keys: Map<String, Value>,
}

/// Upper limit on layers, and on experts of a layer: a larger number is taken for a broken file.
const MAX_LAYERS_OR_EXPERTS: usize = 1 << 16;

/// The window that Mistral, Qwen and Gemma have when the key is absent.
fn default_window() -> Option<usize> {
    Some(4096)
}

fn default_eps() -> f64 {
    1e-6
}

impl Config {
    /// Drops all keys that neither this structure nor the model's family reads, which has these.
    pub(crate) fn with_family_keys(mut self, names: &[&str]) -> Self {
        self.keys.retain(|key, _| names.contains(&key.as_str()));
        self
    }

    /// Deserializes the keys that only this model's family reads.
    ///
    /// # Errors
    /// A key whose value has another type.
    pub(crate) fn keys<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_value(Value::Object(self.keys.clone())).map_err(|error| Error::Config(error.to_string()))
    }

    /// Refuses any activation but `possible`, the one that the model was published with.
    pub(crate) fn check_activation(&self, given: Option<&str>, possible: &str) -> Result<()> {
        match given.filter(|given| *given != possible) {
            Some(given) => {
                Err(Error::Config(format!("hidden activation '{given}' is unknown: possible is {possible}")))
            }
            None => Ok(()),
        }
    }

    /// Width of the sliding window in tokens. 0 is an error: some programs take it for no window and others refuse it.
    pub(crate) fn window(&self) -> Result<Option<usize>> {
        match self.sliding_window {
            Some(0) => Err(Error::Config("sliding_window is 0; the least is 1, null is none".into())),
            window => Ok(window),
        }
    }

    /// The causal mask, in which a token sees all tokens before it, or only the last `window` tokens, itself included.
    pub(crate) fn causal_mask(&self, window: Option<usize>) -> Mask {
        match window {
            Some(window) => Mask::causal().window(Some(window.saturating_sub(1)), None),
            None => Mask::causal(),
        }
    }

    /// Whether each layer has a sliding window, if `layer_types` is given.
    ///
    /// # Errors
    /// Kinds of layers that are unknown, and a list of another length than there are layers.
    pub(crate) fn sliding_layers(&self) -> Result<Option<Vec<bool>>> {
        let Some(types) = &self.layer_types else { return Ok(None) };
        let known = ["full_attention", "sliding_attention"];
        if types.len() != self.num_hidden_layers {
            let problem = format!("{} layer_types for {} layers", types.len(), self.num_hidden_layers);
            return Err(Error::Config(problem));
        }
        if let Some(unknown) = types.iter().find(|kind| !known.contains(&kind.as_str())) {
            let problem = format!("layer type '{unknown}' is unknown: possible are {}", known.join(", "));
            return Err(Error::Config(problem));
        }
        Ok(Some(types.iter().map(|kind| kind == known[1]).collect()))
    }

    /// The mask of each layer: without `layer_types`, layers with an even index have the sliding window.
    ///
    /// # Errors
    /// As for [`Self::sliding_layers`]; a sliding layer without a window.
    pub(crate) fn alternating_masks(&self) -> Result<Vec<Mask>> {
        let alternating = || (0..self.num_hidden_layers).map(|layer| layer.is_multiple_of(2)).collect();
        let slides = self.sliding_layers()?.unwrap_or_else(alternating);
        let width = self.window()?;
        if let Some(layer) = slides.iter().position(|slides| *slides).filter(|_| width.is_none()) {
            return Err(Error::Config(format!("layer {layer} is sliding_attention, which needs a sliding_window")));
        }
        Ok(slides.into_iter().map(|slides| self.causal_mask(width.filter(|_| slides))).collect())
    }

    /// The numbers of query heads H and key-value heads G.
    pub(crate) fn heads(&self) -> HeadCounts {
        HeadCounts { queries: self.num_attention_heads, key_values: self.num_key_value_heads() }
    }

    /// Refuses sizes that contradict each other.
    pub(crate) fn check_sizes(&self) -> Result<()> {
        let refuse = |problem: String| Err(Error::Config(problem));
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
        // A broken file must not make the program allocate more memory than there is.
        for (name, size) in
            [("num_hidden_layers", self.num_hidden_layers), ("num_experts", self.num_experts().unwrap_or(0))]
        {
            if size > MAX_LAYERS_OR_EXPERTS {
                return refuse(format!("{name} is {size}; the most is {MAX_LAYERS_OR_EXPERTS}"));
            }
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
        let dropout = self.attention_dropout();
        // The share is used as f32, so it is checked as f32.
        if !(dropout >= 0.0 && (dropout as f32) < 1.0) {
            return refuse(format!("attention_dropout is {dropout}, but must be at least 0 and, as f32, below 1"));
        }
        Ok(())
    }

    /// Probability with which an attention weight is dropped in training.
    pub fn attention_dropout(&self) -> f64 {
        self.attention_dropout.unwrap_or(0.0)
    }

    /// Number of key-value heads G.
    pub fn num_key_value_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Width D of a query or key head.
    pub fn head_dim(&self) -> usize {
        let default = || match self.model_type.as_str() {
            "qwen3" => 128,
            _ => self.hidden_size / self.num_attention_heads.max(1),
        };
        self.head_dim.unwrap_or_else(default)
    }

    /// Standard deviation of the matrices of a newly initialised model.
    pub(crate) fn initializer_range(&self) -> f64 {
        self.initializer_range.unwrap_or(0.02)
    }

    /// A copy of the configuration with changed parameters of the rotary embedding.
    pub(crate) fn with_rope(&self, change: impl FnOnce(Parameters) -> Parameters) -> Self {
        let parameters = self.rope().cloned().unwrap_or_default();
        Self { rope_parameters: Some(change(parameters)), rope_scaling: None, ..self.clone() }
    }

    pub(crate) fn rope(&self) -> Option<&Parameters> {
        self.rope_parameters.as_ref().or(self.rope_scaling.as_ref())
    }

    /// Kind, scaling factor and original positions of the rotary embedding of all layers; where local and global layers have
    /// their own, of the global ones.
    pub(crate) fn global_rope(&self) -> (&str, f64, Option<f64>) {
        let Some(rope) = self.rope() else { return ("default", 1.0, None) };
        let own = |key: &str| rope.others.get("full_attention").and_then(|global| global.get(key));
        let number = |key: &str| own(key).and_then(Value::as_f64);
        let kind = own("rope_type").or_else(|| own("type")).and_then(|kind| kind.as_str());
        let factor = number("factor").or(rope.factor).unwrap_or(1.0);
        let original = number("original_max_position_embeddings").or(rope.original_max_position_embeddings);
        (kind.unwrap_or(rope.kind()), factor, original)
    }

    /// Number of experts of each sparse layer. The key has two names: transformers 5 writes another one than older files have.
    pub fn num_experts(&self) -> Option<usize> {
        self.num_experts.or(self.num_local_experts)
    }

    /// Factor of the router's load-balancing loss, if the model is trained with one.
    pub fn router_aux_loss(&self) -> Option<f64> {
        let coefficient = self.router_aux_loss_coef.unwrap_or(0.001);
        Some(coefficient).filter(|_| self.output_router_logits == Some(true) && self.num_experts().is_some())
    }
}

#[cfg(test)]
mod test;
