"""The tiny models without experts that make_model_fixtures.py makes: configurations, and what each must show."""

from dataclasses import dataclass, field

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)


@dataclass
class Tiny:
    """The configuration of a tiny model, and how its fixture is made."""

    config: PreTrainedConfig
    # Each of these must change the logits, or the fixture would not show its feature: keys of the configuration with
    # other values, or patterns of parameters' names (with a `*`) with the value that fills these parameters.
    ablations: list[dict] = field(default_factory=list)
    # Tokens of a second, shorter row; 0 is none.
    short: int = 0
    # Whether the experts are stored in MXFP4.
    mxfp4: bool = False


SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.15,
    attn_implementation="eager",
    bos_token_id=1,
    eos_token_id=2,
)
# A configuration without padding token, whose row of the embedding would stay 0.
UNPADDED = SIZES | dict(pad_token_id=None)

PLAIN = dict(rope_type="default", rope_theta=10000.0)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.5)
# The fixture's rows are longer than what the model was trained with.
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=3.0)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
YARN_FINE = YARN | dict(beta_fast=2.0, beta_slow=0.5, truncate=False, mscale=0.7, mscale_all_dim=1.3)
# Factors for the three rotary pairs; the rows are longer than 16 tokens.
LONGROPE = PLAIN | dict(
    rope_type="longrope",
    short_factor=[1.0, 1.1, 1.3],
    long_factor=[1.2, 2.5, 6.0],
    original_max_position_embeddings=16,
    partial_rotary_factor=0.75,
)

# Two local layers, a global one, and another local one; windows shorter than a row.
GEMMA3 = SIZES | dict(
    num_hidden_layers=4,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    head_dim=16,
    query_pre_attn_scalar=24,
    sliding_window=9,
    tie_word_embeddings=True,
    rope_parameters={
        "full_attention": dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
        "sliding_attention": dict(rope_type="default", rope_theta=10000.0),
    },
)

DENSE = {
    "llama": Tiny(
        LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=False), [dict(rope_parameters=PLAIN)]
    ),
    "llama_tied": Tiny(LlamaConfig(**SIZES | dict(num_key_value_heads=1, tie_word_embeddings=True))),
    "qwen2": Tiny(Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "qwen3": Tiny(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)),
    "llama_linear": Tiny(
        LlamaConfig(**SIZES, rope_parameters=LINEAR, tie_word_embeddings=True), [dict(rope_parameters=PLAIN)]
    ),
    "llama_dynamic": Tiny(
        LlamaConfig(**SIZES | dict(max_position_embeddings=16), rope_parameters=DYNAMIC, tie_word_embeddings=True),
        [dict(rope_parameters=PLAIN)],
    ),
    "qwen2_yarn": Tiny(
        Qwen2Config(**SIZES | dict(max_position_embeddings=64), rope_parameters=YARN, tie_word_embeddings=True),
        [dict(rope_parameters=PLAIN)],
    ),
    "qwen3_yarn": Tiny(
        Qwen3Config(
            **SIZES | dict(max_position_embeddings=64), head_dim=16, rope_parameters=YARN_FINE, tie_word_embeddings=True
        ),
        [dict(rope_parameters=PLAIN)],
    ),
    "gemma3": Tiny(Gemma3TextConfig(**GEMMA3), [dict(query_pre_attn_scalar=16)]),
    "mistral": Tiny(MistralConfig(**SIZES, sliding_window=9, tie_word_embeddings=False), [dict(sliding_window=None)]),
    "granite": Tiny(
        GraniteConfig(
            **UNPADDED,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.6,
            logits_scaling=1.7,
        ),
        [
            dict(embedding_multiplier=1.0),
            dict(attention_multiplier=8**-0.5),
            dict(residual_multiplier=1.0),
            dict(logits_scaling=1.0),
            {"*_proj.bias": 0.0},
        ],
    ),
    "gemma2": Tiny(
        Gemma2Config(
            **UNPADDED | dict(num_hidden_layers=4),
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=9,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=4.0,
        ),
        [
            dict(query_pre_attn_scalar=16),
            dict(attn_logit_softcapping=None),
            dict(final_logit_softcapping=None),
            dict(layer_types=["full_attention"] * 4),
            dict(layer_types=["full_attention", "sliding_attention"] * 2),
            {"*.post_attention_layernorm.weight": 0.0},
            {"*.post_feedforward_layernorm.weight": 0.0},
        ],
    ),
    "olmo2": Tiny(
        Olmo2Config(**UNPADDED),
        [
            {"*.q_norm.weight": 1.0},
            {"*.k_norm.weight": 1.0},
            {"*.post_attention_layernorm.weight": 1.0},
            {"*.post_feedforward_layernorm.weight": 1.0},
        ],
    ),
    "smollm3": Tiny(
        SmolLM3Config(
            **UNPADDED | dict(num_hidden_layers=4),
            no_rope_layers=[1, 0, 1, 0],
            use_sliding_window=True,
            sliding_window=9,
        ),
        [
            dict(no_rope_layers=[1, 1, 1, 1]),
            dict(no_rope_layers=[0, 1, 0, 1]),
            dict(layer_types=["full_attention"] * 4),
            dict(layer_types=["sliding_attention"] * 4),
        ],
    ),
    "glm4": Tiny(
        Glm4Config(**UNPADDED, head_dim=16, partial_rotary_factor=0.5),
        [
            dict(rope_parameters=PLAIN | dict(partial_rotary_factor=1.0)),
            {"*.post_self_attn_layernorm.weight": 1.0},
            {"*.post_mlp_layernorm.weight": 1.0},
            {"*_proj.bias": 0.0},
        ],
    ),
    "phi3": Tiny(Phi3Config(**UNPADDED, sliding_window=9), [dict(sliding_window=None)]),
    "phi3_longrope": Tiny(
        Phi3Config(
            **UNPADDED | dict(max_position_embeddings=64),
            rope_parameters=LONGROPE,
            original_max_position_embeddings=16,
            tie_word_embeddings=True,
        ),
        [
            dict(rope_parameters=LONGROPE | dict(long_factor=LONGROPE["short_factor"])),
            dict(rope_parameters=LONGROPE | dict(attention_factor=1.0)),
            dict(rope_parameters=PLAIN | dict(partial_rotary_factor=0.75)),
            dict(rope_parameters=PLAIN | dict(partial_rotary_factor=1.0)),
        ],
        short=12,
    ),
}
