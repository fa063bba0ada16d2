//! Phi-3 and Phi-4 (Microsoft, 2024): Llama with fused projections, and a rotary embedding scaled pair by pair (LongRoPE).

use crate::config::Config;
use crate::error::{Error, Result};
use crate::family::{Family, causal_lm, family_keys, with_defaults};
use crate::rope;
use crate::rope_parameters::Parameters;
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
        resid_pdrop: Option<f64>,
    }
}

pub(crate) const FAMILY: Family =
    Family { model_type: "phi3", keys: Keys::NAMES, fill_defaults: |json| with_defaults(json, defaults()), model };

/// The defaults that transformers uses for keys that `config.json` lacks.
fn defaults() -> Value {
    json!({ "rms_norm_eps": 1e-5, "sliding_window": null, "original_max_position_embeddings": 4096 })
}

fn model(config: &Config, builder: &ModelBuilder) -> Result<Arc<dyn LanguageModel>> {
    config.check_activation(config.hidden_act.as_deref(), "silu")?;
    let keys: Keys = config.keys()?;
    if let Some(rate) = keys.resid_pdrop.filter(|rate| *rate != 0.0) {
        return Err(Error::Config(format!("resid_pdrop is {rate}: possible is 0, residuals as they are")));
    }
    let (mask, rope) = (config.causal_mask(config.window()?), Arc::new(rope::partial(&kind(config)?, 10_000.0, 1.0)?));
    let norm = |scope: &Scope| RmsNorm::new(scope, config.hidden_size, config.rms_norm_eps);
    let layer = |index, scope: &Scope| Phi3Layer::new(config, index, scope, rope.clone(), mask.clone());
    Ok(Arc::new(causal_lm(config, builder, norm, layer)))
}

/// The configuration with the current name of its rotary embedding: old files write `su` or `yarn` and mean LongRoPE.
fn kind(config: &Config) -> Result<Config> {
    match config.rope().map(Parameters::kind) {
        None | Some("default" | "longrope") => Ok(config.clone()),
        Some("su" | "yarn") => Ok(config.with_rope(|parameters| parameters.with_kind("longrope"))),
        Some(other) => {
            Err(Error::Config(format!("rope type '{other}' is unknown to phi3: possible are default, longrope")))
        }
    }
}

#[derive(Debug)]
struct Phi3Layer {
    input_layernorm: RmsNorm,
    qkv_proj: QkvLinear,
    rope: Arc<RotaryEmbedding>,
    attention: Attention,
    o_proj: RowLinear,
    post_attention_layernorm: RmsNorm,
    mlp: GatedMlp,
}

impl Phi3Layer {
    fn new(config: &Config, index: usize, scope: &Scope, rope: Arc<RotaryEmbedding>, mask: Mask) -> Self {
        let Config { hidden_size: hidden, intermediate_size, rms_norm_eps: eps, .. } = *config;
        let (heads, dim, attention) = (config.heads(), config.head_dim(), scope.at("self_attn"));
        let score = Score::new(1.0 / (dim as f32).sqrt());
        Self {
            input_layernorm: RmsNorm::new(&scope.at("input_layernorm"), hidden, eps),
            qkv_proj: QkvLinear::stacked(&attention.at("qkv_proj"), hidden, heads, dim, false),
            rope,
            attention: Attention::new(&attention, index, heads, mask, score).with_dropout(config.attention_dropout()),
            o_proj: RowLinear::from_heads(&attention.at("o_proj"), heads, dim, hidden, false),
            post_attention_layernorm: RmsNorm::new(&scope.at("post_attention_layernorm"), hidden, eps),
            mlp: GatedMlp::stacked(&scope.at("mlp"), hidden, intermediate_size, Activation::Silu),
        }
    }
}

impl Layer for Phi3Layer {
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
