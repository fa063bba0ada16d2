//! gpt-oss: one tensor per parameter holds all experts of a layer, files store gate and up projections apart, and heads have
//! sinks.

use super::{GgufFamily, Joined, RotaryPairs, TwoTensors};
use serde_json::json;

pub(super) const GPT_OSS: GgufFamily = GgufFamily {
    architecture: "gpt-oss",
    sparse: true,
    model_type: "gpt_oss",
    class: "GptOssForCausalLM",
    config: |metadata, config| {
        config["num_local_experts"] = json!(metadata.need("expert_count")?);
        config["num_experts_per_tok"] = json!(metadata.need("expert_used_count")?);
        if let Some(width) = metadata.count("expert_feed_forward_length")? {
            config["intermediate_size"] = json!(width);
        }
        config["attention_bias"] = json!(metadata.has("blk.0.attn_q.bias"));
        // Files do not record `truncate`: in all published models the borders of YaRN are not rounded to whole pairs.
        config["rope_scaling"] = json!({ "rope_type": "default", "truncate": false });
        Ok(())
    },
    modules: &[("post_attention_norm", "post_attention_layernorm"), ("ffn_gate_inp", "mlp.router")],
    full_names: &[
        ("attn_sinks.weight", "self_attn.sinks"),
        ("ffn_down_exps.weight", "mlp.experts.down_proj"),
        ("ffn_down_exps.bias", "mlp.experts.down_proj_bias"),
    ],
    split: &[
        TwoTensors {
            stored: ["ffn_gate_exps.weight", "ffn_up_exps.weight"],
            parameter: "mlp.experts.gate_up_proj",
            joined: Joined::Alternating,
            unless: None,
        },
        TwoTensors {
            stored: ["ffn_gate_exps.bias", "ffn_up_exps.bias"],
            parameter: "mlp.experts.gate_up_proj_bias",
            joined: Joined::Alternating,
            unless: None,
        },
    ],
    pairs: RotaryPairs::Unchanged,
    norms_plus_one: false,
    partial_rotary: false,
};
