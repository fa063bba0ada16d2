//! Gemma 2 (Gemma Team, 2024): norms before and after each block, soft caps on scores and logits, a window in every other layer.

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
use ringspan_candle::residual::residual;
use serde_json::{Value, json};
use std::sync::Arc;

family_keys! {
    struct Keys {
        hidden_activation: Option<String>,
        query_pre_attn_scalar: f64,
        attn_logit_softcapping: Option<f64>,
        final_logit_softcapping: Option<f64>,
        use_bidirectional_attention: Option<bool>,
    }
}

/// The defaults that transformers uses for keys that `config.json` lacks.
fn defaults() -> Value {
    json!({
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": true,
    })
}

pub(crate) const FAMILY: Family =
    Family { model_type: "gemma2", keys: Keys::NAMES, fill_defaults: |json| with_defaults(json, defaults()), model };

fn model(config: &Config, builder: &ModelBuilder) -> Result<Arc<dyn LanguageModel>> {
    let keys: Keys = config.keys()?;
    config.check_activation(keys.hidden_activation.as_deref(), "gelu_pytorch_tanh")?;
    if keys.use_bidirectional_attention == Some(true) {
        return Err(Error::Config("use_bidirectional_attention is true: possible is false, a causal model".into()));
    }
    let positive = |name: &str, value: f64| match value > 0.0 && value.is_finite() {
        true => Ok(value as f32),
        false => Err(Error::Config(format!("{name} is {value}; it must be above 0"))),
    };
    let cap = |name: &str, value: Option<f64>| value.map(|value| positive(name, value)).transpose();
    let scalar = positive("query_pre_attn_scalar", keys.query_pre_attn_scalar)?;
    let softcap = cap("attn_logit_softcapping", keys.attn_logit_softcapping)?;
    let score = Score { softcap, ..Score::new(1.0 / scalar.sqrt()) };
    let (masks, rope) = (config.alternating_masks()?, Arc::new(rope::of_all_layers(config)?));
    let norm = |scope: &Scope| RmsNorm::with_offset(scope, config.hidden_size, config.rms_norm_eps, 1.0);
    let layer = |index: usize, scope: &Scope| {
        GemmaLayer::new(config, index, scope, rope.clone(), masks[index].clone(), score.clone())
    };
    let mut model = causal_lm(config, builder, norm, layer);
    model.embed_tokens = model.embed_tokens.with_scale(f64::from((config.hidden_size as f64).sqrt() as f32));
    model.lm_head = model.lm_head.with_softcap(cap("final_logit_softcapping", keys.final_logit_softcapping)?);
    Ok(Arc::new(model))
}

#[derive(Debug)]
struct GemmaLayer {
    input_layernorm: RmsNorm,
    qkv_proj: QkvLinear,
    rope: Arc<RotaryEmbedding>,
    attention: Attention,
    o_proj: RowLinear,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    mlp: GatedMlp,
    post_feedforward_layernorm: RmsNorm,
}

impl GemmaLayer {
    fn new(config: &Config, index: usize, scope: &Scope, rope: Arc<RotaryEmbedding>, mask: Mask, score: Score) -> Self {
        let Config { hidden_size: hidden, rms_norm_eps: eps, attention_bias: bias, .. } = *config;
        let (heads, dim, attention) = (config.heads(), config.head_dim(), scope.at("self_attn"));
        let norm = |name: &str| RmsNorm::with_offset(&scope.at(name), hidden, eps, 1.0);
        Self {
            input_layernorm: norm("input_layernorm"),
            qkv_proj: QkvLinear::new(&attention, hidden, heads, dim, bias),
            rope,
            attention: Attention::new(&attention, index, heads, mask, score).with_dropout(config.attention_dropout()),
            o_proj: RowLinear::from_heads(&attention.at("o_proj"), heads, dim, hidden, bias),
            post_attention_layernorm: norm("post_attention_layernorm"),
            pre_feedforward_layernorm: norm("pre_feedforward_layernorm"),
            mlp: GatedMlp::new(&scope.at("mlp"), hidden, config.intermediate_size, false, Activation::GeluTanh),
            post_feedforward_layernorm: norm("post_feedforward_layernorm"),
        }
    }
}

impl Layer for GemmaLayer {
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> candle_core::Result<[Tensor; 3]> {
        let [q, k, v] = self.qkv_proj.forward(&self.input_layernorm.forward(x, pass)?, pass)?;
        Ok([self.rope.forward(q, pass)?, self.rope.forward(k, pass)?, v])
    }

    fn output(&self, x: &Tensor, attended: &Tensor, pass: &ForwardPass) -> candle_core::Result<Tensor> {
        let attended = self.o_proj.forward(attended, pass)?;
        let attended = self.post_attention_layernorm.forward(&attended, pass)?;
        let (x, h) = self.pre_feedforward_layernorm.add_and_norm(x, &attended, pass)?;
        let fed = self.post_feedforward_layernorm.forward(&self.mlp.forward(&h, pass)?, pass)?;
        residual(&x, &fed)
    }

    fn attention(&self) -> &Attention {
        &self.attention
    }
}
