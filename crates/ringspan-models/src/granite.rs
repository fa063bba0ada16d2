//! Granite 3 and 4.1 (IBM, 2024): Llama with factors on embeddings, scores, residuals and logits.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::family::{Family, causal_lm, family_keys};
use crate::rope;
use candle_core::Tensor;
use ringspan::{Mask, Score};
use ringspan_candle::LanguageModel;
use ringspan_candle::activation::Activation;
use ringspan_candle::layers::{
    Attention, ForwardPass, GatedMlp, QkvLinear, RmsNorm, RotaryEmbedding, RowLinear, scaled,
};
use ringspan_candle::model::{Layer, ModelBuilder, Scope};
use ringspan_candle::residual::residual;
use std::sync::Arc;

family_keys! {
    /// The factors; each is 1 if it is absent.
    struct Keys {
        embedding_multiplier: Option<f64>,
        attention_multiplier: Option<f64>,
        residual_multiplier: Option<f64>,
        logits_scaling: Option<f64>,
    }
}

pub(crate) const FAMILY: Family =
    Family { model_type: "granite", keys: Keys::NAMES, fill_defaults: |json| json, model };

fn model(config: &Config, builder: &ModelBuilder) -> Result<Arc<dyn LanguageModel>> {
    config.check_activation(config.hidden_act.as_deref(), "silu")?;
    let keys: Keys = config.keys()?;
    let factor = |name: &str, value: Option<f64>| match value.unwrap_or(1.0) {
        factor if factor > 0.0 && factor.is_finite() => Ok(factor),
        factor => Err(Error::Config(format!("{name} is {factor}; it must be above 0"))),
    };
    let embedding = factor("embedding_multiplier", keys.embedding_multiplier)?;
    let attention = factor("attention_multiplier", keys.attention_multiplier)?;
    let residual = factor("residual_multiplier", keys.residual_multiplier)?;
    let logits = factor("logits_scaling", keys.logits_scaling)?;
    let (rope, score) = (Arc::new(rope::of_all_layers(config)?), Score::new(attention as f32));
    let norm = |scope: &Scope| RmsNorm::new(scope, config.hidden_size, config.rms_norm_eps);
    let layer = |index, scope: &Scope| GraniteLayer::new(config, index, scope, rope.clone(), score.clone(), residual);
    let mut model = causal_lm(config, builder, norm, layer);
    model.embed_tokens = model.embed_tokens.with_scale(embedding);
    model.lm_head = model.lm_head.with_scale(1.0 / logits);
    Ok(Arc::new(model))
}

#[derive(Debug)]
struct GraniteLayer {
    input_layernorm: RmsNorm,
    qkv_proj: QkvLinear,
    rope: Arc<RotaryEmbedding>,
    attention: Attention,
    o_proj: RowLinear,
    post_attention_layernorm: RmsNorm,
    mlp: GatedMlp,
    residual_multiplier: f64,
}

impl GraniteLayer {
    fn new(
        config: &Config,
        index: usize,
        scope: &Scope,
        rope: Arc<RotaryEmbedding>,
        score: Score,
        residual_multiplier: f64,
    ) -> Self {
        let Config { hidden_size: hidden, intermediate_size, rms_norm_eps: eps, attention_bias: bias, .. } = *config;
        let (heads, dim, attention) = (config.heads(), config.head_dim(), scope.at("self_attn"));
        let dropout = config.attention_dropout();
        Self {
            input_layernorm: RmsNorm::new(&scope.at("input_layernorm"), hidden, eps),
            qkv_proj: QkvLinear::new(&attention, hidden, heads, dim, bias),
            rope,
            attention: Attention::new(&attention, index, heads, Mask::causal(), score).with_dropout(dropout),
            o_proj: RowLinear::from_heads(&attention.at("o_proj"), heads, dim, hidden, bias),
            post_attention_layernorm: RmsNorm::new(&scope.at("post_attention_layernorm"), hidden, eps),
            mlp: GatedMlp::new(&scope.at("mlp"), hidden, intermediate_size, config.mlp_bias, Activation::Silu),
            residual_multiplier,
        }
    }
}

impl Layer for GraniteLayer {
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> candle_core::Result<[Tensor; 3]> {
        let [q, k, v] = self.qkv_proj.forward(&self.input_layernorm.forward(x, pass)?, pass)?;
        Ok([self.rope.forward(q, pass)?, self.rope.forward(k, pass)?, v])
    }

    fn output(&self, x: &Tensor, attended: &Tensor, pass: &ForwardPass) -> candle_core::Result<Tensor> {
        let attended = self.o_proj.forward(attended, pass)?;
        let attended = scaled(&attended, self.residual_multiplier)?;
        let (x, h) = self.post_attention_layernorm.add_and_norm(x, &attended, pass)?;
        residual(&x, &scaled(&self.mlp.forward(&h, pass)?, self.residual_multiplier)?)
    }

    fn attention(&self) -> &Attention {
        &self.attention
    }
}
