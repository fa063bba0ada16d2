//! Gemma 2 and Gemma 3. In the files, 1 is added to the norms' weights.

use super::{GgufFamily, Metadata, RotaryPairs};
use crate::error::Result;
use serde_json::{Value, json};

pub(super) const GEMMA2: GgufFamily = GgufFamily {
    architecture: "gemma2",
    sparse: false,
    model_type: "gemma2",
    class: "Gemma2ForCausalLM",
    config: |metadata, config| {
        for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
            if let Some(cap) = metadata.number(key) {
                config[key] = json!(cap);
            }
        }
        of_both(metadata, config, 46)
    },
    modules: &[
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    ],
    full_names: &[],
    split: &[],
    pairs: RotaryPairs::Unchanged,
    norms_plus_one: true,
    partial_rotary: false,
};

pub(super) const GEMMA3: GgufFamily = GgufFamily {
    architecture: "gemma3",
    model_type: "gemma3_text",
    class: "Gemma3ForCausalLM",
    config: |metadata, config| {
        config["rope_local_base_freq"] = json!(metadata.number("rope.freq_base_swa").unwrap_or(10_000.0));
        config["sliding_window_pattern"] = json!(metadata.count("attention.sliding_window_pattern")?.unwrap_or(6));
        // The model refuses this key, since Gemma 3 was never published with it.
        if let Some(cap) = metadata.number("final_logit_softcapping").filter(|cap| *cap != 0.0) {
            config["final_logit_softcapping"] = json!(cap);
        }
        of_both(metadata, config, 62)
    },
    ..GEMMA2
};

/// Adds the keys that both have. The model of 27B parameters, recognised by its number of `layers`, divides scores by the root
/// of hidden size / heads, not of the head's width.
fn of_both(metadata: &Metadata, config: &mut Value, layers: u64) -> Result<()> {
    let scalar = match metadata.need("block_count")? == layers {
        true => metadata.need("embedding_length")? as f64 / metadata.need("attention.head_count")?.max(1) as f64,
        false => config["head_dim"].as_f64().unwrap_or(256.0),
    };
    config["query_pre_attn_scalar"] = json!(scalar);
    config["hidden_activation"] = json!("gelu_pytorch_tanh");
    config["hidden_act"] = json!("gelu_pytorch_tanh");
    Ok(())
}
