//! DeepSeek-V2 and V3, which share an architecture name and differ in how their routers score. The keys for widths of heads
//! depend on the version of llama.cpp: newer files give the latent width under the plain keys, and a head's own width under
//! keys with `_mla`.

use super::{GgufFamily, Joined, Metadata, RotaryPairs, TwoTensors};
use crate::error::Result;
use serde_json::{Value, json};

pub(super) const DEEPSEEK2: GgufFamily = GgufFamily {
    architecture: "deepseek2",
    sparse: true,
    model_type: "deepseek_v2",
    class: "DeepseekV2ForCausalLM",
    config,
    modules: &[
        ("attn_q_a", "self_attn.q_a_proj"),
        ("attn_q_a_norm", "self_attn.q_a_layernorm"),
        ("attn_q_b", "self_attn.q_b_proj"),
        ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
        ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
        ("attn_kv_b", "self_attn.kv_b_proj"),
        ("ffn_gate_inp", "mlp.gate"),
        ("ffn_gate_exps", "mlp.experts.{}.gate_proj"),
        ("ffn_up_exps", "mlp.experts.{}.up_proj"),
        ("ffn_down_exps", "mlp.experts.{}.down_proj"),
        ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
        ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
        ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
    ],
    full_names: &[("exp_probs_b.bias", "mlp.gate.e_score_correction_bias")],
    split: &[TwoTensors {
        stored: ["attn_k_b.weight", "attn_v_b.weight"],
        parameter: "self_attn.kv_b_proj.weight",
        joined: Joined::LatentHeads,
        unless: Some("attn_kv_b.weight"),
    }],
    pairs: RotaryPairs::Unchanged,
    norms_plus_one: false,
    partial_rotary: true,
};

fn config(metadata: &Metadata, config: &mut Value) -> Result<()> {
    let broken = |problem: String| Err(metadata.file().broken(&problem));
    let turned = metadata.need("rope.dimension_count")?;
    let of_head = |key: &str| match metadata.count(&format!("attention.{key}_mla"))? {
        Some(width) => Ok(width),
        None => metadata.need(&format!("attention.{key}")),
    };
    let (keys, values) = (of_head("key_length")?, of_head("value_length")?);
    if keys <= turned {
        return broken(format!(
            "keys have {keys} elements, of which rope.dimension_count {turned} turn: some must not"
        ));
    }
    let sigmoid = match metadata.count("expert_gating_func")? {
        None | Some(1) => false,
        Some(2) => true,
        Some(other) => {
            return broken(format!("expert_gating_func is {other}: possible are 1, softmax, and 2, sigmoid"));
        }
    };
    let (groups, chosen) = (metadata.count("expert_group_count")?, metadata.count("expert_group_used_count")?);
    let groups = groups.filter(|groups| *groups > 1);
    let mut own = json!({
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": metadata.count("attention.q_lora_rank")?.filter(|rank| *rank > 0),
        "kv_lora_rank": metadata.need("attention.kv_lora_rank")?,
        "qk_nope_head_dim": keys - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": values,
        "head_dim": turned,
        "first_k_dense_replace": metadata.count("leading_dense_block_count")?.unwrap_or(0),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length")?,
        "n_routed_experts": metadata.need("expert_count")?,
        "num_experts_per_tok": metadata.need("expert_used_count")?,
        "n_shared_experts": metadata.need("expert_shared_count")?,
        // In these files 0 means that no scale is given.
        "routed_scaling_factor": metadata.number("expert_weights_scale").filter(|scale| *scale != 0.0).unwrap_or(1.0),
        "norm_topk_prob": metadata.flag("expert_weights_norm").unwrap_or(false),
        "n_group": groups.unwrap_or(1),
        "topk_group": groups.and(chosen).unwrap_or(1),
        "scoring_func": "softmax",
        "topk_method": if groups.is_some() { "group_limited_greedy" } else { "greedy" },
    });
    if sigmoid {
        own["model_type"] = json!("deepseek_v3");
        own["architectures"] = json!(["DeepseekV3ForCausalLM"]);
        own["scoring_func"] = json!("sigmoid");
        own["topk_method"] = json!("noaux_tc");
        own["rope_interleave"] = json!(true);
    }
    // llama.cpp stores a tenth of the value at Hugging Face, where `mscale` and `mscale_all_dim` are equal in all models of
    // this kind.
    own["rope_scaling"] = match metadata.number("rope.scaling.yarn_log_multiplier").filter(|strength| *strength != 0.0)
    {
        Some(strength) => json!({ "mscale": 10.0 * strength, "mscale_all_dim": 10.0 * strength }),
        None => json!({ "attention_factor": 1.0 }),
    };
    if metadata.text("rope.scaling.type") != Some("yarn") {
        own["rope_scaling"] = Value::Null;
    }
    if let (Value::Object(config), Value::Object(own)) = (config, own) {
        // The rotary part of a head is given by `qk_rope_head_dim`, so no share of the head may be given as well.
        config.remove("partial_rotary_factor");
        config.extend(own);
    }
    Ok(())
}
