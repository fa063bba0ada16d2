//! SmolLM3 (Hugging Face, 2025): Llama in which some layers have no rotary embedding.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::family::{Family, causal_lm, family_keys, with_defaults};
use crate::rope;
use candle_core::Tensor;
use ringspan::{Mask, Score};
use ringspan_candle::LanguageModel;
use ringspan_candle::activation::Activation;
use ringspan_candle::layers::{Attention, ForwardPass, GatedMlp, QkvLinear, RmsNorm, RotaryEmbedding, RowLinear};
use ringspan_candle::model::{Layer, ModelBuilder, Scope};
use serde_json::{Value, json};
use std::sync::Arc;

family_keys! {
    struct Keys {
        /// In spite of its name, 1 stands for a layer with rotary embedding, 0 for one without.
        no_rope_layers: Option<Vec<usize>>,
        no_rope_layer_interval: Option<usize>,
        use_sliding_window: Option<bool>,
    }
}

/// The defaults that transformers uses for keys that `config.json` lacks.
fn defaults() -> Value {
    json!({ "tie_word_embeddings": true, "sliding_window": null, "rms_norm_eps": 1e-6 })
}

pub(crate) const FAMILY: Family =
    Family { model_type: "smollm3", keys: Keys::NAMES, fill_defaults: |json| with_defaults(json, defaults()), model };

fn model(config: &Config, builder: &ModelBuilder) -> Result<Arc<dyn LanguageModel>> {
    config.check_activation(config.hidden_act.as_deref(), "silu")?;
    let keys: Keys = config.keys()?;
    let rotates = rotates(config, &keys)?;
    let masks = masks(config, &keys, &rotates)?;
    let rope = Arc::new(rope::new(config, config.rope(), 2_000_000.0)?);
    let norm = |scope: &Scope| RmsNorm::new(scope, config.hidden_size, config.rms_norm_eps);
    let layer = |index: usize, scope: &Scope| {
        SmolLayer::new(config, index, scope, rotates[index].then(|| rope.clone()), masks[index].clone())
    };
    Ok(Arc::new(causal_lm(config, builder, norm, layer)))
}

/// Whether each layer has a rotary embedding.
fn rotates(config: &Config, keys: &Keys) -> Result<Vec<bool>> {
    let layers = config.num_hidden_layers;
    let interval = keys.no_rope_layer_interval.unwrap_or(4);
    match &keys.no_rope_layers {
        Some(listed) if listed.len() < layers => {
            Err(Error::Config(format!("no_rope_layers names {} of {layers} layers", listed.len())))
        }
        Some(listed) => Ok(listed.iter().take(layers).map(|layer| *layer != 0).collect()),
        None if interval == 0 => Err(Error::Config("no_rope_layer_interval is 0; the least is 1".into())),
        None => Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect()),
    }
}

/// The mask of each layer. Without `layer_types`, a window that is in use applies to the layers without rotary embedding.
fn masks(config: &Config, keys: &Keys, rotates: &[bool]) -> Result<Vec<Mask>> {
    let width = config.window()?.filter(|_| keys.use_sliding_window == Some(true));
    let slides = match config.sliding_layers()? {
        Some(slides) => slides,
        None => rotates.iter().map(|rotates| !rotates && width.is_some()).collect(),
    };
    if let Some(index) = slides.iter().position(|slides| *slides).filter(|_| width.is_none()) {
        return Err(Error::Config(format!(
            "layer {index} is sliding_attention, which needs use_sliding_window true and a sliding_window"
        )));
    }
    Ok(slides.into_iter().map(|slides| config.causal_mask(width.filter(|_| slides))).collect())
}

#[derive(Debug)]
struct SmolLayer {
    input_layernorm: RmsNorm,
    qkv_proj: QkvLinear,
    rope: Option<Arc<RotaryEmbedding>>,
    attention: Attention,
    o_proj: RowLinear,
    post_attention_layernorm: RmsNorm,
    mlp: GatedMlp,
}

impl SmolLayer {
    fn new(config: &Config, index: usize, scope: &Scope, rope: Option<Arc<RotaryEmbedding>>, mask: Mask) -> Self {
        let Config { hidden_size: hidden, intermediate_size, rms_norm_eps: eps, attention_bias: bias, .. } = *config;
        let (heads, dim, attention) = (config.heads(), config.head_dim(), scope.at("self_attn"));
        let score = Score::new(1.0 / (dim as f32).sqrt());
        Self {
            input_layernorm: RmsNorm::new(&scope.at("input_layernorm"), hidden, eps),
            qkv_proj: QkvLinear::new(&attention, hidden, heads, dim, bias),
            rope,
            attention: Attention::new(&attention, index, heads, mask, score).with_dropout(config.attention_dropout()),
            o_proj: RowLinear::from_heads(&attention.at("o_proj"), heads, dim, hidden, bias),
            post_attention_layernorm: RmsNorm::new(&scope.at("post_attention_layernorm"), hidden, eps),
            mlp: GatedMlp::new(&scope.at("mlp"), hidden, intermediate_size, config.mlp_bias, Activation::Silu),
        }
    }
}

impl Layer for SmolLayer {
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> candle_core::Result<[Tensor; 3]> {
        let [mut q, mut k, v] = self.qkv_proj.forward(&self.input_layernorm.forward(x, pass)?, pass)?;
        if let Some(rope) = &self.rope {
            (q, k) = (rope.forward(q, pass)?, rope.forward(k, pass)?);
        }
        Ok([q, k, v])
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
