//! Qwen2 (Yang et al., 2024): Llama with biases for queries, keys and values, and sliding windows in some layers.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::family::{Family, causal_lm, family_keys};
use crate::rope;
use candle_core::Tensor;
use ringspan::{Mask, Score};
use ringspan_candle::LanguageModel;
use ringspan_candle::activation::Activation;
use ringspan_candle::layers::{Attention, ForwardPass, GatedMlp, QkvLinear, RmsNorm, RotaryEmbedding, RowLinear};
use ringspan_candle::model::{Layer, ModelBuilder, Scope};
use std::sync::Arc;

family_keys! {
    /// The keys that only Qwen2 and Qwen3 read.
    pub(crate) struct Keys {
        use_sliding_window: Option<bool>,
        max_window_layers: Option<usize>,
    }
}

pub(crate) const FAMILY: Family = Family { model_type: "qwen2", keys: Keys::NAMES, fill_defaults: |json| json, model };

fn model(config: &Config, builder: &ModelBuilder) -> Result<Arc<dyn LanguageModel>> {
    config.check_activation(config.hidden_act.as_deref(), "silu")?;
    let (rope, masks) = (Arc::new(rope::of_all_layers(config)?), masks(config)?);
    let norm = |scope: &Scope| RmsNorm::new(scope, config.hidden_size, config.rms_norm_eps);
    let layer = |index: usize, scope: &Scope| Qwen2Layer::new(config, index, scope, rope.clone(), masks[index].clone());
    Ok(Arc::new(causal_lm(config, builder, norm, layer)))
}

/// The mask of each layer. A window counts only if `use_sliding_window` is set: the files name one even where it is not used.
pub(crate) fn masks(config: &Config) -> Result<Vec<Mask>> {
    let Keys { use_sliding_window, max_window_layers } = config.keys()?;
    let width = config.window()?.filter(|_| use_sliding_window == Some(true));
    let slides = match config.sliding_layers()? {
        Some(slides) => slides,
        None => {
            let first = max_window_layers.unwrap_or(28);
            (0..config.num_hidden_layers).map(|layer| width.is_some() && layer >= first).collect()
        }
    };
    if let Some(index) = slides.iter().position(|slides| *slides).filter(|_| width.is_none()) {
        return Err(Error::Config(format!(
            "layer {index} is sliding_attention, which needs use_sliding_window true and a sliding_window"
        )));
    }
    Ok(slides.into_iter().map(|slides| config.causal_mask(width.filter(|_| slides))).collect())
}

#[derive(Debug)]
struct Qwen2Layer {
    input_layernorm: RmsNorm,
    qkv_proj: QkvLinear,
    rope: Arc<RotaryEmbedding>,
    attention: Attention,
    o_proj: RowLinear,
    post_attention_layernorm: RmsNorm,
    mlp: GatedMlp,
}

impl Qwen2Layer {
    fn new(config: &Config, index: usize, scope: &Scope, rope: Arc<RotaryEmbedding>, mask: Mask) -> Self {
        let Config { hidden_size: hidden, intermediate_size, rms_norm_eps: eps, .. } = *config;
        let (heads, dim, attention) = (config.heads(), config.head_dim(), scope.at("self_attn"));
        let score = Score::new(1.0 / (dim as f32).sqrt());
        Self {
            input_layernorm: RmsNorm::new(&scope.at("input_layernorm"), hidden, eps),
            qkv_proj: QkvLinear::new(&attention, hidden, heads, dim, true),
            rope,
            attention: Attention::new(&attention, index, heads, mask, score).with_dropout(config.attention_dropout()),
            o_proj: RowLinear::from_heads(&attention.at("o_proj"), heads, dim, hidden, false),
            post_attention_layernorm: RmsNorm::new(&scope.at("post_attention_layernorm"), hidden, eps),
            mlp: GatedMlp::new(&scope.at("mlp"), hidden, intermediate_size, false, Activation::Silu),
        }
    }
}

impl Layer for Qwen2Layer {
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> candle_core::Result<[Tensor; 3]> {
        let [q, k, v] = self.qkv_proj.forward(&self.input_layernorm.forward(x, pass)?, pass)?;
        Ok([self.rope.forward(q, pass)?, self.rope.forward(k, pass)?, v])
    }

    fn output(&self, x: &Tensor, attended: &Tensor, pass: &ForwardPass) -> candle_core::Result<Tensor> {
        let attended = self.o_proj.forward(attended, pass)?;
        let (x, h) = self.post_attention_layernorm.add_and_norm(x, &attended, pass)?;
        self.mlp.add_to(&x, &h, pass)
    }

    fn attention(&self) -> &Attention {
        &self.attention
    }
}
