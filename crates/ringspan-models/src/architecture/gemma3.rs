//! The text of Gemma 3 (Gemma Team, 2025): norms on both sides of each block, and local layers between global ones.

use super::{Architecture, Layer, sliding, window};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::rope::{Parameters, Rope};
use ringspan::Score;
use ringspan_candle::activation::Activation;
use serde_json::{Value, json};

const GLOBAL: usize = 0;
const LOCAL: usize = 1;

pub(super) fn architecture(config: &Config) -> Result<Architecture> {
    let act = config.hidden_activation.as_deref().or(config.hidden_act.as_deref());
    if let Some(act) = act.filter(|act| *act != "gelu_pytorch_tanh") {
        return Err(Error::Config(format!("hidden_activation '{act}' is unknown: possible is gelu_pytorch_tanh")));
    }
    for (key, value) in [
        ("final_logit_softcapping", config.final_logit_softcapping),
        // Transformers reads this key for Gemma 3 and computes without it.
        ("attn_logit_softcapping", config.attn_logit_softcapping),
    ] {
        if let Some(cap) = value {
            return Err(Error::Config(format!("{key} is {cap}: possible is null, as Gemma 3 was published")));
        }
    }
    if config.use_bidirectional_attention == Some(true) {
        return Err(Error::Config("use_bidirectional_attention is true: possible is false, a causal model".into()));
    }
    let scalar = config.query_pre_attn_scalar.unwrap_or(256.0);
    if !(scalar > 0.0 && scalar.is_finite()) {
        return Err(Error::Config(format!("query_pre_attn_scalar is {scalar}; it must be above 0")));
    }
    let slides = match &config.layer_types {
        Some(types) => sliding(config, types)?,
        None => {
            let pattern = config.sliding_window_pattern().unwrap_or(6);
            if pattern == 0 {
                return Err(Error::Config("sliding_window_pattern is 0; the least is 1, all layers global".into()));
            }
            (0..config.num_hidden_layers).map(|layer| (layer + 1) % pattern != 0).collect()
        }
    };
    let width = window(config.sliding_window)?;
    if let Some(layer) = slides.iter().position(|slides| *slides).filter(|_| width.is_none()) {
        return Err(Error::Config(format!("layer {layer} is sliding_attention, which needs a sliding_window")));
    }
    let layer = |slides: bool| Layer {
        window: width.filter(|_| slides),
        rope: if slides { LOCAL } else { GLOBAL },
        sparse: false,
    };
    let [global, local] = ropes(config)?;
    Ok(Architecture {
        qkv_bias: config.attention_bias,
        output_bias: config.attention_bias,
        mlp_bias: false,
        qk_norm: true,
        post_norms: true,
        norm_offset: 1.0,
        embedding_scale: f64::from((config.hidden_size as f64).sqrt() as f32),
        activation: Activation::GeluTanh,
        score: Score::new(1.0 / scalar.sqrt() as f32),
        ropes: vec![global, local],
        layers: slides.into_iter().map(layer).collect(),
        sparse: None,
    })
}

/// The rotary embedding of global layers and that of local ones. Newer files have both below `rope_parameters`; in
/// older ones `rope_scaling` is that of global layers.
fn ropes(config: &Config) -> Result<[Rope; 2]> {
    let own = |kind: &str| -> Result<Option<Parameters>> {
        let of_kind = config.rope().and_then(|all| all.others.get(kind)).filter(|value| !value.is_null());
        let parse = |value: &Value| serde_json::from_value(value.clone());
        of_kind.map(parse).transpose().map_err(|error| Error::Config(format!("rope parameters of {kind}: {error}")))
    };
    let (global, local) = (own("full_attention")?, own("sliding_attention")?);
    let nested = global.is_some() || local.is_some();
    let global = if nested { global } else { config.rope().cloned() };
    let local_theta = config.rope_local_base_freq.unwrap_or(10_000.0);
    let mut local = local.unwrap_or_default();
    local.rope_theta.get_or_insert(local_theta);
    Ok([Rope::new(config, global.as_ref(), 1_000_000.0)?, Rope::new(config, Some(&local), 10_000.0)?])
}

/// The text's part of a model that sees images, too, and the sizes that files leave out.
pub(super) fn completed(json: Value) -> Value {
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
    if let Value::Object(keys) = &mut text {
        keys.insert("model_type".into(), "gemma3_text".into());
        for (key, value) in [
            ("vocab_size", json!(262_208)),
            ("hidden_size", json!(2304)),
            ("intermediate_size", json!(9216)),
            ("num_hidden_layers", json!(26)),
            ("num_attention_heads", json!(8)),
            ("num_key_value_heads", json!(4)),
            ("head_dim", json!(256)),
            ("max_position_embeddings", json!(131_072)),
            ("tie_word_embeddings", json!(true)),
        ] {
            keys.entry(key).or_insert(value);
        }
    }
    text
}
