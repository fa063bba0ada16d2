//! GLM-4 (Team GLM, 2024): norms before and after each block, half of a head rotated in neighbouring pairs, fused gate and up.

use crate::config::Config;
use crate::error::Result;
use crate::family::{Family, causal_lm, with_defaults};
use crate::rope;
use candle_core::Tensor;
use ringspan::{Mask, Score};
use ringspan_candle::LanguageModel;
use ringspan_candle::activation::Activation;
use ringspan_candle::layers::{Attention, ForwardPass, GatedMlp, QkvLinear, RmsNorm, RotaryEmbedding, RowLinear};
use ringspan_candle::model::{Layer, ModelBuilder, Scope};
use ringspan_candle::residual::residual;
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) const FAMILY: Family =
    Family { model_type: "glm4", keys: &[], fill_defaults: |json| with_defaults(json, defaults()), model };

/// The defaults that transformers uses for keys that `config.json` lacks.
fn defaults() -> Value {
    json!({ "attention_bias": true, "head_dim": 128, "rms_norm_eps": 1.5625e-7 })
}

fn model(config: &Config, builder: &ModelBuilder) -> Result<Arc<dyn LanguageModel>> {
    config.check_activation(config.hidden_act.as_deref(), "silu")?;
    let rope = rope::partial(config, 10_000.0, 0.5)?;
    let rope = Arc::new(RotaryEmbedding { interleaved: true, ..rope });
    let norm = |scope: &Scope| RmsNorm::new(scope, config.hidden_size, config.rms_norm_eps);
    let layer = |index, scope: &Scope| Glm4Layer::new(config, index, scope, rope.clone());
    Ok(Arc::new(causal_lm(config, builder, norm, layer)))
}

#[derive(Debug)]
struct Glm4Layer {
    input_layernorm: RmsNorm,
    qkv_proj: QkvLinear,
    rope: Arc<RotaryEmbedding>,
    attention: Attention,
    o_proj: RowLinear,
    post_self_attn_layernorm: RmsNorm,
    /// In spite of its name, this is the norm before the feed-forward part.
    post_attention_layernorm: RmsNorm,
    mlp: GatedMlp,
    post_mlp_layernorm: RmsNorm,
}

impl Glm4Layer {
    fn new(config: &Config, index: usize, scope: &Scope, rope: Arc<RotaryEmbedding>) -> Self {
        let Config { hidden_size: hidden, intermediate_size, rms_norm_eps: eps, attention_bias: bias, .. } = *config;
        let (heads, dim, attention) = (config.heads(), config.head_dim(), scope.at("self_attn"));
        let (score, dropout) = (Score::new(1.0 / (dim as f32).sqrt()), config.attention_dropout());
        let norm = |name: &str| RmsNorm::new(&scope.at(name), hidden, eps);
        Self {
            input_layernorm: norm("input_layernorm"),
            qkv_proj: QkvLinear::new(&attention, hidden, heads, dim, bias),
            rope,
            attention: Attention::new(&attention, index, heads, Mask::causal(), score).with_dropout(dropout),
            o_proj: RowLinear::from_heads(&attention.at("o_proj"), heads, dim, hidden, false),
            post_self_attn_layernorm: norm("post_self_attn_layernorm"),
            post_attention_layernorm: norm("post_attention_layernorm"),
            mlp: GatedMlp::stacked(&scope.at("mlp"), hidden, intermediate_size, Activation::Silu),
            post_mlp_layernorm: norm("post_mlp_layernorm"),
        }
    }
}

impl Layer for Glm4Layer {
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> candle_core::Result<[Tensor; 3]> {
        let [q, k, v] = self.qkv_proj.forward(&self.input_layernorm.forward(x, pass)?, pass)?;
        Ok([self.rope.forward(q, pass)?, self.rope.forward(k, pass)?, v])
    }

    fn output(&self, x: &Tensor, attended: &Tensor, pass: &ForwardPass) -> candle_core::Result<Tensor> {
        let attended = self.o_proj.forward(attended, pass)?;
        let attended = self.post_self_attn_layernorm.forward(&attended, pass)?;
        let (x, h) = self.post_attention_layernorm.add_and_norm(x, &attended, pass)?;
        residual(&x, &self.post_mlp_layernorm.forward(&self.mlp.forward(&h, pass)?, pass)?)
    }

    fn attention(&self) -> &Attention {
        &self.attention
    }
}
