"""The tiny mixtures of experts that make_model_fixtures.py makes: configurations, and what each must show."""

from tiny_models import PLAIN, SIZES, UNPADDED, YARN, Tiny
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig

# Sparse and dense layers; there are more experts than a token is routed to.
MOE = SIZES | dict(
    num_hidden_layers=3,
    head_dim=16,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    norm_topk_prob=True,
    output_router_logits=False,
    tie_word_embeddings=False,
)

# Pre-activations are about as large as the limit, so both kinds of clamps are met.
GPT_OSS = UNPADDED | dict(
    head_dim=16,
    intermediate_size=32,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=9,
    swiglu_alpha=1.4,
    swiglu_limit=0.8,
    max_position_embeddings=64,
    rope_parameters=YARN | dict(rope_theta=150000.0, beta_fast=32.0, beta_slow=0.2, truncate=False),
)

# Values are narrower than keys; the norms of the latent vectors have an epsilon of their own, 1e-6.
DEEPSEEK = UNPADDED | dict(
    num_key_value_heads=4,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
    kv_lora_rank=20,
    q_lora_rank=24,
    rms_norm_eps=0.01,
    first_k_dense_replace=1,
    moe_intermediate_size=16,
    n_routed_experts=6,
    num_experts_per_tok=2,
    max_position_embeddings=64,
)

SPARSE = {
    "qwen3_moe": Tiny(Qwen3MoeConfig(**MOE, mlp_only_layers=[1]), [dict(norm_topk_prob=False)]),
    "qwen3_moe_balanced": Tiny(
        Qwen3MoeConfig(
            **MOE
            | dict(norm_topk_prob=False, output_router_logits=True, num_experts_per_tok=3, num_hidden_layers=2),
            decoder_sparse_step=1,
            router_aux_loss_coef=0.5,
        )
    ),
    "mixtral": Tiny(
        MixtralConfig(
            **UNPADDED | dict(intermediate_size=24),
            head_dim=16,
            sliding_window=9,
            num_local_experts=6,
            num_experts_per_tok=2,
        ),
        [dict(sliding_window=None), dict(num_experts_per_tok=1), dict(num_experts_per_tok=3)],
    ),
    "gpt_oss": Tiny(
        GptOssConfig(**GPT_OSS),
        [
            {"*.sinks": -1e4},
            {"*.router.bias": 0.0},
            {"*.gate_up_proj_bias": 0.0},
            {"*.down_proj_bias": 0.0},
            dict(layer_types=["full_attention"] * 2),
            dict(layer_types=["full_attention", "sliding_attention"]),
            dict(swiglu_limit=7.0),
            dict(swiglu_alpha=1.702),
            dict(rope_parameters=GPT_OSS["rope_parameters"] | dict(truncate=True)),
            dict(rope_parameters=PLAIN | dict(rope_theta=150000.0)),
        ],
    ),
    "gpt_oss_balanced": Tiny(
        GptOssConfig(
            **GPT_OSS | dict(num_hidden_layers=1, intermediate_size=16),
            output_router_logits=True,
            router_aux_loss_coef=0.5,
        )
    ),
    "gpt_oss_mxfp4": Tiny(GptOssConfig(**GPT_OSS | dict(intermediate_size=64)), [{"*.sinks": -1e4}], mxfp4=True),
    "deepseek_v2": Tiny(
        DeepseekV2Config(
            **DEEPSEEK,
            n_shared_experts=2,
            topk_method="group_limited_greedy",
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.6,
            rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=1.3),
        ),
        [
            dict(topk_method="greedy"),
            dict(topk_group=2),
            dict(routed_scaling_factor=1.0),
            dict(rope_parameters=YARN | dict(mscale=1.3, mscale_all_dim=1.3)),
            dict(rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.7)),
            dict(rope_parameters=PLAIN),
            {"*.shared_experts.down_proj.weight": 0.0},
            {"*.q_a_layernorm.weight": 1.0},
            {"*.kv_a_layernorm.weight": 1.0},
        ],
    ),
    "deepseek_v2_lite": Tiny(
        DeepseekV2Config(**DEEPSEEK | dict(q_lora_rank=None), n_shared_experts=1, rope_parameters=PLAIN),
        [dict(num_experts_per_tok=1), {"*.kv_a_layernorm.weight": 1.0}],
    ),
    "deepseek_v3": Tiny(
        DeepseekV3Config(
            **DEEPSEEK,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.6,
            rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0),
        ),
        [
            {"*.e_score_correction_bias": 0.0},
            dict(n_group=1),
            dict(norm_topk_prob=False),
            dict(routed_scaling_factor=1.0),
            dict(rope_interleave=False),
            dict(rope_parameters=YARN | dict(attention_factor=1.0)),
        ],
    ),
}
