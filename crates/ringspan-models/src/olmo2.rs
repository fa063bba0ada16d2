//! OLMo 2 (Team OLMo, 2025): norms after attention and feed-forward part, and norms of queries and keys across all heads at
//! once.

use crate::config::Config;
use crate::error::Result;
use crate::family::{Family, causal_lm, with_defaults};
use crate::rope;
use candle_core::Tensor;
use ringspan::{Mask, Score};
use ringspan_candle::LanguageModel;
use ringspan_candle::activation::Activation;
use ringspan_candle::layers::{
    AllHeadsNorm, Attention, ForwardPass, GatedMlp, QkvLinear, RmsNorm, RotaryEmbedding, RowLinear,
};
use ringspan_candle::model::{Layer, ModelBuilder, Scope};
use ringspan_candle::residual::residual;
use serde_json::{Value, json};
use std::sync::Arc;

/// The defaults that transformers uses for keys that `config.json` lacks.
fn defaults() -> Value {
    json!({ "rms_norm_eps": 1e-5 })
}

pub(crate) const FAMILY: Family =
    Family { model_type: "olmo2", keys: &[], fill_defaults: |json| with_defaults(json, defaults()), model };

fn model(config: &Config, builder: &ModelBuilder) -> Result<Arc<dyn LanguageModel>> {
    config.check_activation(config.hidden_act.as_deref(), "silu")?;
    let rope = Arc::new(rope::of_all_layers(config)?);
    let norm = |scope: &Scope| RmsNorm::new(scope, config.hidden_size, config.rms_norm_eps);
    let layer = |index, scope: &Scope| OlmoLayer::new(config, index, scope, rope.clone());
    Ok(Arc::new(causal_lm(config, builder, norm, layer)))
}

#[derive(Debug)]
struct OlmoLayer {
    qkv_proj: QkvLinear,
    q_norm: AllHeadsNorm,
    k_norm: AllHeadsNorm,
    rope: Arc<RotaryEmbedding>,
    attention: Attention,
    o_proj: RowLinear,
    post_attention_layernorm: RmsNorm,
    mlp: GatedMlp,
    post_feedforward_layernorm: RmsNorm,
}

impl OlmoLayer {
    fn new(config: &Config, index: usize, scope: &Scope, rope: Arc<RotaryEmbedding>) -> Self {
        let Config { hidden_size: hidden, intermediate_size, rms_norm_eps: eps, attention_bias: bias, .. } = *config;
        let (heads, dim, attention) = (config.heads(), config.head_dim(), scope.at("self_attn"));
        let (score, dropout) = (Score::new(1.0 / (dim as f32).sqrt()), config.attention_dropout());
        Self {
            qkv_proj: QkvLinear::new(&attention, hidden, heads, dim, bias),
            q_norm: AllHeadsNorm::of_queries(&attention.at("q_norm"), heads, dim, eps),
            k_norm: AllHeadsNorm::of_keys(&attention.at("k_norm"), heads, dim, eps),
            rope,
            attention: Attention::new(&attention, index, heads, Mask::causal(), score).with_dropout(dropout),
            o_proj: RowLinear::from_heads(&attention.at("o_proj"), heads, dim, hidden, bias),
            post_attention_layernorm: RmsNorm::new(&scope.at("post_attention_layernorm"), hidden, eps),
            mlp: GatedMlp::new(&scope.at("mlp"), hidden, intermediate_size, false, Activation::Silu),
            post_feedforward_layernorm: RmsNorm::new(&scope.at("post_feedforward_layernorm"), hidden, eps),
        }
    }
}

impl Layer for OlmoLayer {
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> candle_core::Result<[Tensor; 3]> {
        let [q, k, v] = self.qkv_proj.forward(x, pass)?;
        let q = self.rope.forward(self.q_norm.forward(&q, pass)?, pass)?;
        let k = self.rope.forward(self.k_norm.forward(&k, pass)?, pass)?;
        Ok([q, k, v])
    }

    fn output(&self, x: &Tensor, attended: &Tensor, pass: &ForwardPass) -> candle_core::Result<Tensor> {
        let attended = self.o_proj.forward(attended, pass)?;
        let x = residual(x, &self.post_attention_layernorm.forward(&attended, pass)?)?;
        let fed = self.mlp.forward(&x, pass)?;
        residual(&x, &self.post_feedforward_layernorm.forward(&fed, pass)?)
    }

    fn attention(&self) -> &Attention {
        &self.attention
    }
}
