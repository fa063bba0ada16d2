"""The tiny models of which make_gguf_family_fixtures.py makes GGUF files: configurations, and what llama.cpp's converter changes."""

import numpy as np

COMMON = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
# Tensors whose names in transformers do not end in weight or bias.
WHOLE = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)
ROPE = dict(rope_type="default", rope_theta=10000.0)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
DEEPSEEK = dict(
    num_key_value_heads=4,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    kv_lora_rank=32,
    first_k_dense_replace=1,
    moe_intermediate_size=32,
    n_routed_experts=6,
    num_experts_per_tok=2,
    tie_word_embeddings=False,
)
DEEPSEEK_KEYS = {
    "rope.dimension_count": 16,
    "attention.kv_lora_rank": 32,
    "leading_dense_block_count": 1,
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
}
# Metadata of newer files of DeepSeek: the plain keys give latent widths, the keys with `_mla` the widths of a head.
LATENT_HEADS = {
    "attention.head_count_kv": 1,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 32,
}
PLAIN = dict(rope_parameters=ROPE)
FACTORS = dict(short_factor=[1.0 + 0.1 * i for i in range(8)], long_factor=[1.0 + i for i in range(8)])

# For each family: its name in transformers, its configuration, the names of its modules, and the metadata that only it has.
FAMILIES = {
    "llama": ("llama", PLAIN | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=False), {}, {}),
    "mixtral": (
        "mixtral",
        PLAIN | dict(num_local_experts=3, num_experts_per_tok=2, tie_word_embeddings=False),
        {},
        {"expert_count": 3, "expert_used_count": 2},
    ),
    "qwen2": ("qwen2", PLAIN | dict(tie_word_embeddings=True), {}, {}),
    "qwen3": ("qwen3", PLAIN | dict(head_dim=32, tie_word_embeddings=True), {}, {"attention.key_length": 32}),
    "qwen3moe": (
        "qwen3_moe",
        PLAIN | dict(head_dim=32, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
        {},
        {
            "attention.key_length": 32,
            "expert_count": 3,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
        },
    ),
    "gemma2": (
        "gemma2",
        PLAIN
        | dict(head_dim=32, query_pre_attn_scalar=32, sliding_window=5)
        | dict(attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
        GEMMA,
        {
            "attention.key_length": 32,
            "attention.sliding_window": 5,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        dict(head_dim=32, query_pre_attn_scalar=32, sliding_window=5, num_hidden_layers=6, hidden_size=32)
        | dict(intermediate_size=64)
        | dict(
            rope_parameters={
                "full_attention": dict(rope_type="linear", factor=4.0, rope_theta=1e6),
                "sliding_attention": ROPE,
            }
        ),
        GEMMA,
        {
            "attention.key_length": 32,
            "attention.sliding_window": 5,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
        },
    ),
    "olmo2": (
        "olmo2",
        PLAIN | dict(tie_word_embeddings=False),
        {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
        {},
    ),
    "glm4": (
        "glm4",
        dict(head_dim=32, partial_rotary_factor=0.5, attention_bias=True, tie_word_embeddings=False)
        | dict(rope_parameters=ROPE | dict(partial_rotary_factor=0.5)),
        {
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "mlp.gate_up_proj": "ffn_up",
        },
        {"attention.key_length": 32, "rope.dimension_count": 16},
    ),
    "phi3": (
        "phi3",
        dict(
            sliding_window=7,
            original_max_position_embeddings=16,
            tie_word_embeddings=False,
            rope_parameters=ROPE | dict(rope_type="longrope", original_max_position_embeddings=16, **FACTORS),
        ),
        {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        {
            "attention.sliding_window": 7,
            "rope.dimension_count": 16,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(16) / np.log(16))),
        },
    ),
    "smollm3": ("smollm3", PLAIN | dict(num_hidden_layers=4, no_rope_layer_interval=4), {}, {}),
    "granite": (
        "granite",
        PLAIN
        | dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=2.0)
        | dict(tie_word_embeddings=True),
        {},
        {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 2.0},
    ),
    # Like older files: keys and values are made by one matrix, and the keys for widths are those of the heads.
    "deepseek2": (
        "deepseek_v2",
        DEEPSEEK
        | dict(q_lora_rank=32, n_shared_experts=2, topk_method="group_limited_greedy", n_group=2, topk_group=1)
        | dict(routed_scaling_factor=1.6, rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.7, beta_slow=0.2)),
        {},
        DEEPSEEK_KEYS
        | YARN_KEYS
        | {
            "attention.q_lora_rank": 32,
            "attention.key_length": 48,
            "attention.value_length": 32,
            "expert_shared_count": 2,
            "expert_weights_scale": 1.6,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "rope.scaling.yarn_log_multiplier": 0.07,
            "rope.scaling.yarn_beta_slow": 0.2,
        },
    ),
    "deepseek2-lite": (
        "deepseek_v2",
        DEEPSEEK | dict(q_lora_rank=None, n_shared_experts=1, rope_parameters=ROPE),
        {},
        DEEPSEEK_KEYS | LATENT_HEADS | {"expert_shared_count": 1, "expert_weights_scale": 1.0, "expert_gating_func": 1},
    ),
    "deepseek3": (
        "deepseek_v3",
        DEEPSEEK
        | dict(q_lora_rank=32, n_shared_experts=1, n_group=2, topk_group=1, routed_scaling_factor=1.6)
        | dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0)),
        {},
        DEEPSEEK_KEYS
        | LATENT_HEADS
        | YARN_KEYS
        | {
            "attention.q_lora_rank": 32,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.6,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "rope.scaling.yarn_log_multiplier": 0.1,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        dict(head_dim=32, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=5)
        | dict(tie_word_embeddings=False, rope_parameters=YARN | dict(rope_theta=150000.0, truncate=False)),
        {"post_attention_layernorm": "post_attention_norm"},
        YARN_KEYS
        | {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": 5,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 64,
            "rope.freq_base": 150000.0,
        },
    ),
}
ARCHITECTURES = {"mixtral": "llama", "deepseek2-lite": "deepseek2", "deepseek3": "deepseek2"}
# In these families llama.cpp rotates neighbouring rows.
NEIGHBOURS = {"llama", "mixtral", "smollm3", "granite"}
