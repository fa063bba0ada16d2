//! Mixtral (Jiang et al., 2024): Mistral whose feed-forward parts are mixtures of experts.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::family::{Family, causal_lm, family_keys, with_defaults};
use crate::rope;
use candle_core::Tensor;
use ringspan::{Mask, Score};
use ringspan_candle::LanguageModel;
use ringspan_candle::layers::{
    Attention, ForwardPass, MixtureOfExperts, QkvLinear, RmsNorm, RotaryEmbedding, Router, RowLinear,
};
use ringspan_candle::model::{Layer, ModelBuilder, Scope};
use serde_json::{Value, json};
use std::sync::Arc;

family_keys! {
    struct Keys {
        num_experts_per_tok: Option<usize>,
        router_jitter_noise: Option<f64>,
    }
}

/// The defaults that transformers uses for keys that `config.json` lacks.
fn defaults() -> Value {
    json!({ "rms_norm_eps": 1e-5, "sliding_window": null })
}

pub(crate) const FAMILY: Family =
    Family { model_type: "mixtral", keys: Keys::NAMES, fill_defaults: |json| with_defaults(json, defaults()), model };

fn model(config: &Config, builder: &ModelBuilder) -> Result<Arc<dyn LanguageModel>> {
    config.check_activation(config.hidden_act.as_deref(), "silu")?;
    let keys: Keys = config.keys()?;
    if let Some(noise) = keys.router_jitter_noise.filter(|noise| *noise != 0.0) {
        return Err(Error::Config(format!("router_jitter_noise is {noise}: possible is 0, tokens as they are")));
    }
    let (experts, top) = (config.num_experts().unwrap_or(8), keys.num_experts_per_tok.unwrap_or(2));
    if !(1..=experts).contains(&top) {
        let problem = format!("num_experts_per_tok is {top}; with {experts} experts possible are 1 to {experts}");
        return Err(Error::Config(problem));
    }
    let router = Router { normalised: true, ..Router::new(experts, top) };
    let (mask, rope) = (config.causal_mask(config.window()?), Arc::new(rope::new(config, config.rope(), 1_000_000.0)?));
    let norm = |scope: &Scope| RmsNorm::new(scope, config.hidden_size, config.rms_norm_eps);
    let layer = |index, scope: &Scope| MixtralLayer::new(config, index, scope, rope.clone(), mask.clone(), router);
    Ok(Arc::new(causal_lm(config, builder, norm, layer)))
}

#[derive(Debug)]
struct MixtralLayer {
    input_layernorm: RmsNorm,
    qkv_proj: QkvLinear,
    rope: Arc<RotaryEmbedding>,
    attention: Attention,
    o_proj: RowLinear,
    post_attention_layernorm: RmsNorm,
    block_sparse_moe: MixtureOfExperts,
}

impl MixtralLayer {
    fn new(
        config: &Config,
        index: usize,
        scope: &Scope,
        rope: Arc<RotaryEmbedding>,
        mask: Mask,
        router: Router,
    ) -> Self {
        let Config { hidden_size: hidden, intermediate_size: width, rms_norm_eps: eps, .. } = *config;
        let (heads, dim, attention) = (config.heads(), config.head_dim(), scope.at("self_attn"));
        let (score, experts) = (Score::new(1.0 / (dim as f32).sqrt()), scope.at("block_sparse_moe"));
        Self {
            input_layernorm: RmsNorm::new(&scope.at("input_layernorm"), hidden, eps),
            qkv_proj: QkvLinear::new(&attention, hidden, heads, dim, false),
            rope,
            attention: Attention::new(&attention, index, heads, mask, score).with_dropout(config.attention_dropout()),
            o_proj: RowLinear::from_heads(&attention.at("o_proj"), heads, dim, hidden, false),
            post_attention_layernorm: RmsNorm::new(&scope.at("post_attention_layernorm"), hidden, eps),
            block_sparse_moe: MixtureOfExperts::named(&experts, index, hidden, width, router, ["w1", "w3", "w2"]),
        }
    }
}

impl Layer for MixtralLayer {
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> candle_core::Result<[Tensor; 3]> {
        let [q, k, v] = self.qkv_proj.forward(&self.input_layernorm.forward(x, pass)?, pass)?;
        Ok([self.rope.forward(q, pass)?, self.rope.forward(k, pass)?, v])
    }

    fn output(&self, x: &Tensor, attended: &Tensor, pass: &ForwardPass) -> candle_core::Result<Tensor> {
        let attended = self.o_proj.forward(attended, pass)?;
        let (x, h) = self.post_attention_layernorm.add_and_norm(x, &attended, pass)?;
        self.block_sparse_moe.add_to(&x, &h, pass)
    }

    fn attention(&self) -> &Attention {
        &self.attention
    }

    fn experts(&self) -> Option<&MixtureOfExperts> {
        Some(&self.block_sparse_moe)
    }
}
