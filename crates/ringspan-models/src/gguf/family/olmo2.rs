//! OLMo 2: norms after attention and feed-forward layers, and norms of queries and keys across all heads.

use super::{GgufFamily, Pairs, no_more};

pub(super) const OLMO2: GgufFamily = GgufFamily {
    architecture: "olmo2",
    sparse: false,
    model_type: "olmo2",
    class: "Olmo2ForCausalLM",
    config: no_more,
    parts: &[("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")],
    whole: &[],
    in_two: &[],
    pairs: Pairs::Unchanged,
    one_in_norms: false,
    partial_rotary: false,
};
