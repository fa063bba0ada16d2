//! Qwen2 and Qwen3.

use super::{GgufFamily, RotaryPairs, no_extra_keys};
use serde_json::json;

pub(super) const QWEN2: GgufFamily = GgufFamily {
    architecture: "qwen2",
    sparse: false,
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    config: no_extra_keys,
    modules: &[],
    full_names: &[],
    split: &[],
    pairs: RotaryPairs::Unchanged,
    norms_plus_one: false,
    partial_rotary: false,
};

pub(super) const QWEN3: GgufFamily =
    GgufFamily { architecture: "qwen3", model_type: "qwen3", class: "Qwen3ForCausalLM", ..QWEN2 };

pub(super) const QWEN3_MOE: GgufFamily = GgufFamily {
    architecture: "qwen3moe",
    sparse: true,
    model_type: "qwen3_moe",
    class: "Qwen3MoeForCausalLM",
    config: |metadata, config| {
        config["num_experts"] = json!(metadata.need("expert_count")?);
        config["num_experts_per_tok"] = json!(metadata.need("expert_used_count")?);
        config["moe_intermediate_size"] = json!(metadata.need("expert_feed_forward_length")?);
        // Files do not record this key; it is true in all published models.
        config["norm_topk_prob"] = json!(true);
        Ok(())
    },
    modules: &[
        ("ffn_gate_inp", "mlp.gate"),
        ("ffn_gate_exps", "mlp.experts.{}.gate_proj"),
        ("ffn_up_exps", "mlp.experts.{}.up_proj"),
        ("ffn_down_exps", "mlp.experts.{}.down_proj"),
    ],
    ..QWEN2
};
