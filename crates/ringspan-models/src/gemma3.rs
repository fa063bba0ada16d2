//! The language model of Gemma 3 (Gemma Team, 2025): norms before and after each block, and local layers between global ones.

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
use ringspan_candle::residual::residual;
use serde_json::{Value, json};
use std::sync::Arc;

family_keys! {
    struct Keys {
        hidden_activation: Option<String>,
        query_pre_attn_scalar: Option<f64>,
        attn_logit_softcapping: Option<f64>,
        final_logit_softcapping: Option<f64>,
        use_bidirectional_attention: Option<bool>,
        /// Every n-th layer is global; transformers writes the key with an underscore.
        sliding_window_pattern: Option<usize>,
        _sliding_window_pattern: Option<usize>,
        rope_local_base_freq: Option<f64>,
    }
}

pub(crate) const FAMILY: Family = Family { model_type: "gemma3_text", keys: Keys::NAMES, fill_defaults, model };

fn model(config: &Config, builder: &ModelBuilder) -> Result<Arc<dyn LanguageModel>> {
    let keys: Keys = config.keys()?;
    let activation = keys.hidden_activation.as_deref().or(config.hidden_act.as_deref());
    config.check_activation(activation, "gelu_pytorch_tanh")?;
    check(&keys)?;
    let scalar = keys.query_pre_attn_scalar.unwrap_or(256.0);
    if !(scalar > 0.0 && scalar.is_finite()) {
        return Err(Error::Config(format!("query_pre_attn_scalar is {scalar}; it must be above 0")));
    }
    let score = Score::new(1.0 / scalar.sqrt() as f32);
    let (masks, ropes) = (masks(config, &keys)?, ropes(config, &keys)?.map(Arc::new));
    let norm = |scope: &Scope| RmsNorm::with_offset(scope, config.hidden_size, config.rms_norm_eps, 1.0);
    let layer = |index: usize, scope: &Scope| {
        let (mask, local) = masks[index].clone();
        GemmaLayer::new(config, index, scope, ropes[usize::from(local)].clone(), mask, score.clone())
    };
    let mut model = causal_lm(config, builder, norm, layer);
    model.embed_tokens = model.embed_tokens.with_scale(f64::from((config.hidden_size as f64).sqrt() as f32));
    Ok(Arc::new(model))
}

/// Refuses settings that Gemma 3 was never published with.
fn check(keys: &Keys) -> Result<()> {
    for (key, value) in [
        ("final_logit_softcapping", keys.final_logit_softcapping),
        // Transformers reads this key for Gemma 3 but does not apply it.
        ("attn_logit_softcapping", keys.attn_logit_softcapping),
    ] {
        if let Some(cap) = value {
            return Err(Error::Config(format!("{key} is {cap}: possible is null, as Gemma 3 was published")));
        }
    }
    match keys.use_bidirectional_attention {
        Some(true) => {
            Err(Error::Config("use_bidirectional_attention is true: possible is false, a causal model".into()))
        }
        _ => Ok(()),
    }
}

/// The mask of each layer, and whether the layer is local.
fn masks(config: &Config, keys: &Keys) -> Result<Vec<(Mask, bool)>> {
    let slides = match config.sliding_layers()? {
        Some(slides) => slides,
        None => {
            let pattern = keys.sliding_window_pattern.or(keys._sliding_window_pattern).unwrap_or(6);
            if pattern == 0 {
                return Err(Error::Config("sliding_window_pattern is 0; the least is 1, all layers global".into()));
            }
            (0..config.num_hidden_layers).map(|layer| !(layer + 1).is_multiple_of(pattern)).collect()
        }
    };
    let width = config.window()?;
    if let Some(layer) = slides.iter().position(|slides| *slides).filter(|_| width.is_none()) {
        return Err(Error::Config(format!("layer {layer} is sliding_attention, which needs a sliding_window")));
    }
    Ok(slides.into_iter().map(|slides| (config.causal_mask(width.filter(|_| slides)), slides)).collect())
}

/// The rotary embeddings of global layers and of local ones. Newer files have both below `rope_parameters`; in older files
/// `rope_scaling` is for global layers only.
fn ropes(config: &Config, keys: &Keys) -> Result<[RotaryEmbedding; 2]> {
    let own = |kind: &str| -> Result<Option<Parameters>> {
        let of_kind = config.rope().and_then(|all| all.others.get(kind)).filter(|value| !value.is_null());
        let parse = |value: &Value| serde_json::from_value(value.clone());
        of_kind.map(parse).transpose().map_err(|error| Error::Config(format!("rope parameters of {kind}: {error}")))
    };
    let (global, local) = (own("full_attention")?, own("sliding_attention")?);
    let nested = global.is_some() || local.is_some();
    let global = if nested { global } else { config.rope().cloned() };
    let mut local = local.unwrap_or_default();
    local.rope_theta.get_or_insert(keys.rope_local_base_freq.unwrap_or(10_000.0));
    let of_local = RotaryEmbedding { id: 1, ..rope::new(config, Some(&local), 10_000.0)? };
    Ok([rope::new(config, global.as_ref(), 1_000_000.0)?, of_local])
}

#[derive(Debug)]
struct GemmaLayer {
    input_layernorm: RmsNorm,
    qkv_proj: QkvLinear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
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
        let norm = |scope: &Scope, width| RmsNorm::with_offset(scope, width, eps, 1.0);
        Self {
            input_layernorm: norm(&scope.at("input_layernorm"), hidden),
            qkv_proj: QkvLinear::new(&attention, hidden, heads, dim, bias),
            q_norm: norm(&attention.at("q_norm"), dim),
            k_norm: norm(&attention.at("k_norm"), dim),
            rope,
            attention: Attention::new(&attention, index, heads, mask, score).with_dropout(config.attention_dropout()),
            o_proj: RowLinear::from_heads(&attention.at("o_proj"), heads, dim, hidden, bias),
            post_attention_layernorm: norm(&scope.at("post_attention_layernorm"), hidden),
            pre_feedforward_layernorm: norm(&scope.at("pre_feedforward_layernorm"), hidden),
            mlp: GatedMlp::new(&scope.at("mlp"), hidden, config.intermediate_size, false, Activation::GeluTanh),
            post_feedforward_layernorm: norm(&scope.at("post_feedforward_layernorm"), hidden),
        }
    }
}

impl Layer for GemmaLayer {
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> candle_core::Result<[Tensor; 3]> {
        let [q, k, v] = self.qkv_proj.forward(&self.input_layernorm.forward(x, pass)?, pass)?;
        let q = self.rope.forward(self.q_norm.forward(&q, pass)?, pass)?;
        let k = self.rope.forward(self.k_norm.forward(&k, pass)?, pass)?;
        Ok([q, k, v])
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
/// Takes the language model's configuration out of a multimodal one, and fills in the sizes that files leave out.
fn fill_defaults(json: Value) -> Value {
    let mut text = match json.get("text_config") {
        Some(Value::Object(text)) if json["model_type"] == "gemma3" => {
            let mut text = text.clone();
            text.insert("architectures".into(), json!(["Gemma3ForCausalLM"]));
            for key in ["dtype", "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"]
            {
                if let (None, Some(value)) = (text.get(key), json.get(key)) {
                    text.insert(key.into(), value.clone());
                }
            }
            Value::Object(text)
        }
        _ => json,
    };
    text["model_type"] = "gemma3_text".into();
    with_defaults(
        text,
        json!({
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": true,
        }),
    )
}
