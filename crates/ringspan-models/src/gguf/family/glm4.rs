//! GLM-4: rotary embedding of a part of each head, norms before and after each block, gate and up projection in one matrix.

use super::{GgufFamily, RotaryPairs};
use serde_json::json;

pub(super) const GLM4: GgufFamily = GgufFamily {
    architecture: "glm4",
    sparse: false,
    model_type: "glm4",
    class: "Glm4ForCausalLM",
    config: |metadata, config| {
        config["attention_bias"] = json!(metadata.has("blk.0.attn_q.bias"));
        Ok(())
    },
    modules: &[
        ("post_attention_norm", "post_self_attn_layernorm"),
        ("ffn_up", "mlp.gate_up_proj"),
        ("post_ffw_norm", "post_mlp_layernorm"),
    ],
    full_names: &[],
    split: &[],
    pairs: RotaryPairs::Unchanged,
    norms_plus_one: false,
    partial_rotary: true,
};
