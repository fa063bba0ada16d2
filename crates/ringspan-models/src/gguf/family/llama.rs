//! Llama and the models that llama.cpp computes as Llama, such as Mistral and Mixtral; SmolLM3; Granite.
//!
//! llama.cpp rotates neighbouring rows of queries and keys in all of these, and its converter reorders the rows accordingly.

use super::{GgufFamily, Metadata, RotaryPairs, no_extra_keys};
use crate::error::Result;
use serde_json::{Value, json};

pub(super) const LLAMA: GgufFamily = GgufFamily {
    architecture: "llama",
    sparse: false,
    model_type: "llama",
    class: "LlamaForCausalLM",
    config: biases,
    modules: &[],
    full_names: &[],
    split: &[],
    pairs: RotaryPairs::Neighbours,
    norms_plus_one: false,
    partial_rotary: false,
};

pub(super) const MIXTRAL: GgufFamily = GgufFamily {
    sparse: true,
    model_type: "mixtral",
    class: "MixtralForCausalLM",
    config: |metadata, config| {
        config["num_local_experts"] = json!(metadata.need("expert_count")?);
        config["num_experts_per_tok"] = json!(metadata.need("expert_used_count")?);
        Ok(())
    },
    modules: &[
        ("ffn_gate_inp", "block_sparse_moe.gate"),
        ("ffn_gate_exps", "block_sparse_moe.experts.{}.w1"),
        ("ffn_up_exps", "block_sparse_moe.experts.{}.w3"),
        ("ffn_down_exps", "block_sparse_moe.experts.{}.w2"),
    ],
    ..LLAMA
};

pub(super) const SMOLLM3: GgufFamily = GgufFamily {
    architecture: "smollm3",
    model_type: "smollm3",
    class: "SmolLM3ForCausalLM",
    // Files do not record which layers have a rotary embedding; llama.cpp has the interval built in, too.
    config: |metadata, config| {
        config["no_rope_layer_interval"] = json!(4);
        biases(metadata, config)
    },
    ..LLAMA
};

pub(super) const GRANITE: GgufFamily = GgufFamily {
    architecture: "granite",
    model_type: "granite",
    class: "GraniteForCausalLM",
    config: |metadata, config| {
        for (key, stored) in [
            ("attention_multiplier", "attention.scale"),
            ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"),
            ("logits_scaling", "logit_scale"),
        ] {
            if let Some(factor) = metadata.number(stored) {
                config[key] = json!(factor);
            }
        }
        biases(metadata, config)
    },
    ..LLAMA
};

/// Finds out which linear layers have biases from the tensors in the file.
fn biases(metadata: &Metadata, config: &mut Value) -> Result<()> {
    config["attention_bias"] = json!(metadata.has("blk.0.attn_q.bias"));
    config["mlp_bias"] = json!(metadata.has("blk.0.ffn_gate.bias"));
    no_extra_keys(metadata, config)
}
