//! What a model is, in the words of the blocks that compute it. Each model's file turns its configuration into this.

mod gemma3;
mod llama;
mod mistral;
mod qwen;
mod qwen_moe;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::rope::Rope;
use ringspan::{Mask, Score};
use ringspan_candle::activation::Activation;
use serde_json::Value;

/// The models there are.
const MODELS: &str = "llama, qwen2, qwen3, qwen3_moe, mistral, gemma3_text, gemma3 (its text)";

/// A decoder: embedding, layers of attention and a gated feed-forward part, norm, head.
#[derive(Debug, Clone)]
pub(crate) struct Architecture {
    /// Whether the projections to queries, keys and values have biases.
    pub(crate) qkv_bias: bool,
    /// Whether the projection from the heads has a bias.
    pub(crate) output_bias: bool,
    /// Whether the feed-forward layers have biases.
    pub(crate) mlp_bias: bool,
    /// Whether queries and keys are normed, head by head.
    pub(crate) qk_norm: bool,
    /// Whether the output of attention and of the feed-forward part is normed before it is added.
    pub(crate) post_norms: bool,
    /// What is added to the weight of every norm.
    pub(crate) norm_offset: f64,
    /// Factor on the embeddings.
    pub(crate) embedding_scale: f64,
    pub(crate) activation: Activation,
    pub(crate) score: Score,
    /// The rotary embeddings there are.
    pub(crate) ropes: Vec<Rope>,
    pub(crate) layers: Vec<Layer>,
    /// The sparse feed-forward parts.
    pub(crate) sparse: Option<Sparse>,
}

/// In what a layer differs from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layer {
    /// Tokens a token sees, itself included.
    pub(crate) window: Option<usize>,
    /// Index of its rotary embedding.
    pub(crate) rope: usize,
    /// Whether its feed-forward part is a mixture of experts.
    pub(crate) sparse: bool,
}

/// A mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sparse {
    /// Experts E.
    pub(crate) experts: usize,
    /// Experts K that a token goes to.
    pub(crate) top: usize,
    /// Width I of an expert.
    pub(crate) wide: usize,
    /// Whether a token's K weights are made to sum to 1.
    pub(crate) normed: bool,
}

impl Architecture {
    /// # Errors
    /// A model that is unknown, and what it cannot compute.
    pub(crate) fn new(config: &Config) -> Result<Self> {
        match config.model_type.as_str() {
            "llama" => llama::architecture(config),
            "qwen2" => qwen::qwen2(config),
            "qwen3" => qwen::qwen3(config),
            "qwen3_moe" => qwen_moe::architecture(config),
            "mistral" => mistral::architecture(config),
            "gemma3_text" => gemma3::architecture(config),
            other => Err(Error::Config(format!("model_type '{other}' is unknown: possible are {MODELS}"))),
        }
    }

    /// Llama's: no biases, plain norms, SwiGLU, all layers alike.
    fn plain(config: &Config) -> Result<Self> {
        silu(config)?;
        Ok(Self {
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            qk_norm: false,
            post_norms: false,
            norm_offset: 0.0,
            embedding_scale: 1.0,
            activation: Activation::Silu,
            score: Score::new(1.0 / (config.head_dim() as f32).sqrt()),
            ropes: vec![Rope::new(config, config.rope(), 10_000.0)?],
            layers: vec![Layer { window: None, rope: 0, sparse: false }; config.num_hidden_layers],
            sparse: None,
        })
    }

    /// What a token of a layer sees: all before it, or the last tokens of a window with itself.
    pub(crate) fn mask(&self, layer: usize) -> Mask {
        match self.layers.get(layer).and_then(|layer| layer.window) {
            Some(window) => Mask::causal().window(Some(window.saturating_sub(1)), None),
            None => Mask::causal(),
        }
    }
}

/// `config.json` with what Hugging Face takes for absent keys, where that depends on the model. Of a model with more
/// than text, the text's part.
pub(crate) fn completed(json: Value) -> Value {
    match json["model_type"].as_str() {
        Some("gemma3" | "gemma3_text") => gemma3::completed(json),
        _ => json,
    }
}

fn silu(config: &Config) -> Result<()> {
    match config.hidden_act.as_deref().filter(|act| *act != "silu") {
        Some(act) => Err(Error::Config(format!("hidden_act '{act}' is unknown: possible is silu"))),
        None => Ok(()),
    }
}

/// A window of 0 is none to some files and an error to others: it must be said.
fn window(window: Option<usize>) -> Result<Option<usize>> {
    match window {
        Some(0) => Err(Error::Config("sliding_window is 0; the least is 1, null is none".into())),
        window => Ok(window),
    }
}

/// Which layers slide, by `layer_types`.
///
/// # Errors
/// Other kinds of layers, and another number of them.
fn sliding(config: &Config, types: &[String]) -> Result<Vec<bool>> {
    let known = ["full_attention", "sliding_attention"];
    if types.len() != config.num_hidden_layers {
        let problem = format!("{} layer_types for {} layers", types.len(), config.num_hidden_layers);
        return Err(Error::Config(problem));
    }
    if let Some(unknown) = types.iter().find(|kind| !known.contains(&kind.as_str())) {
        let problem = format!("layer type '{unknown}' is unknown: possible are {}", known.join(", "));
        return Err(Error::Config(problem));
    }
    Ok(types.iter().map(|kind| kind == known[1]).collect())
}
