//! OLMo 2: norms after attention and feed-forward layers, and norms of queries and keys across all heads.

use super::{GgufFamily, RotaryPairs, no_extra_keys};

pub(super) const OLMO2: GgufFamily = GgufFamily {
    architecture: "olmo2",
    sparse: false,
    model_type: "olmo2",
    class: "Olmo2ForCausalLM",
    config: no_extra_keys,
    modules: &[("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")],
    full_names: &[],
    split: &[],
    pairs: RotaryPairs::Unchanged,
    norms_plus_one: false,
    partial_rotary: false,
};
