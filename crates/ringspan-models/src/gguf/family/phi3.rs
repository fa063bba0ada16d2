//! Phi-3 and Phi-4: fused projections, and a factor for each pair of the rotary embedding (LongRoPE).

use super::{GgufFamily, RotaryPairs};
use crate::gguf::rope::pair_factors;
use serde_json::json;

pub(super) const PHI3: GgufFamily = GgufFamily {
    architecture: "phi3",
    sparse: false,
    model_type: "phi3",
    class: "Phi3ForCausalLM",
    config: |metadata, config| {
        if let Some(length) = metadata.count("rope.scaling.original_context_length")? {
            config["original_max_position_embeddings"] = json!(length);
        }
        if let [Some(short), Some(long)] = pair_factors(metadata)? {
            config["rope_scaling"] = json!({ "rope_type": "longrope", "short_factor": short, "long_factor": long });
            if let Some(factor) = metadata.number("rope.scaling.attn_factor") {
                config["rope_scaling"]["attention_factor"] = json!(factor);
            }
        }
        Ok(())
    },
    modules: &[("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")],
    full_names: &[],
    split: &[],
    pairs: RotaryPairs::Unchanged,
    norms_plus_one: false,
    partial_rotary: true,
};
