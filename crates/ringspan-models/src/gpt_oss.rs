//! gpt-oss (OpenAI, 2025, arXiv:2508.10925): experts in all layers, a sliding window in every second one, and a sink for each head.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::family::{Family, causal_lm, family_keys, with_defaults};
use crate::rope;
use candle_core::Tensor;
use ringspan::Score;
use ringspan_candle::LanguageModel;
use ringspan_candle::activation::ClampedSwiglu;
use ringspan_candle::layers::{
    Attention, ForwardPass, MixtureOfExperts, QkvLinear, RmsNorm, RotaryEmbedding, Router, RowLinear,
};
use ringspan_candle::model::{Layer, ModelBuilder, Scope};
use serde_json::{Value, json};
use std::sync::Arc;

family_keys! {
    struct Keys {
        num_experts_per_tok: usize,
        swiglu_alpha: f64,
        swiglu_limit: f64,
        quantization_config: Option<Value>,
    }
}

pub(crate) const FAMILY: Family = Family { model_type: "gpt_oss", keys: Keys::NAMES, fill_defaults, model };

/// Fills in the defaults that transformers uses for absent keys.
fn fill_defaults(json: Value) -> Value {
    let mut json = with_defaults(
        json,
        json!({
            "head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": true, "sliding_window": 128,
            "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
        }),
    );
    if json["rope_parameters"].is_null() && json["rope_scaling"].is_null() {
        json["rope_scaling"] = json!({
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096,
        });
    }
    json
}

fn model(config: &Config, builder: &ModelBuilder) -> Result<Arc<dyn LanguageModel>> {
    config.check_activation(config.hidden_act.as_deref(), "silu")?;
    let keys: Keys = config.keys()?;
    let (router, activation) = (router(config, &keys)?, activation(&keys)?);
    let method = keys.quantization_config.map(|how| how["quant_method"].clone());
    if let Some(method) = method.filter(|method| *method != "mxfp4") {
        return Err(Error::Config(format!("quantization_config has quant_method {method}: possible is mxfp4")));
    }
    let masks = config.alternating_masks()?;
    let rope = Arc::new(rope::new(config, config.rope(), 150_000.0)?);
    let norm = |scope: &Scope| RmsNorm::new(scope, config.hidden_size, config.rms_norm_eps);
    let layer = |index: usize, scope: &Scope| {
        let (hidden, width, bias) = (config.hidden_size, config.intermediate_size, config.attention_bias);
        let (heads, dim, attention) = (config.heads(), config.head_dim(), scope.at("self_attn"));
        let score = Score::new(1.0 / (dim as f32).sqrt());
        GptOssLayer {
            input_layernorm: norm(&scope.at("input_layernorm")),
            qkv_proj: QkvLinear::new(&attention, hidden, heads, dim, bias),
            rope: rope.clone(),
            attention: Attention::new(&attention, index, heads, masks[index].clone(), score)
                .with_sinks(&attention)
                .with_dropout(config.attention_dropout()),
            o_proj: RowLinear::from_heads(&attention.at("o_proj"), heads, dim, hidden, bias),
            post_attention_layernorm: norm(&scope.at("post_attention_layernorm")),
            mlp: MixtureOfExperts::stacked(&scope.at("mlp"), index, hidden, width, router, activation),
        }
    };
    Ok(Arc::new(causal_lm(config, builder, norm, layer)))
}

/// How the router chooses experts. Transformers takes a softmax over the chosen experts' logits alone; it equals the softmax over
/// all experts' logits, normalised to sum to 1 over the chosen ones.
fn router(config: &Config, keys: &Keys) -> Result<Router> {
    let (experts, top) = (config.num_experts().unwrap_or(0), keys.num_experts_per_tok);
    if !(1..=experts).contains(&top) {
        let problem = format!("num_experts_per_tok is {top}; with {experts} experts possible are 1 to {experts}");
        return Err(Error::Config(problem));
    }
    // The router's weight is not a linear layer in transformers.
    Ok(Router { normalised: true, bias: true, adaptable: false, ..Router::new(experts, top) })
}

fn activation(keys: &Keys) -> Result<ClampedSwiglu> {
    let (alpha, limit) = (keys.swiglu_alpha, keys.swiglu_limit);
    for (name, value) in [("swiglu_alpha", alpha), ("swiglu_limit", limit)] {
        if !(value > 0.0 && value.is_finite()) {
            return Err(Error::Config(format!("{name} is {value}; it must be above 0")));
        }
    }
    Ok(ClampedSwiglu { alpha: alpha as f32, limit: limit as f32 })
}

#[derive(Debug)]
struct GptOssLayer {
    input_layernorm: RmsNorm,
    qkv_proj: QkvLinear,
    rope: Arc<RotaryEmbedding>,
    attention: Attention,
    o_proj: RowLinear,
    post_attention_layernorm: RmsNorm,
    mlp: MixtureOfExperts,
}

impl Layer for GptOssLayer {
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

    fn experts(&self) -> Option<&MixtureOfExperts> {
        Some(&self.mlp)
    }
}
