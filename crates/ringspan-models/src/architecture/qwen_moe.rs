//! Qwen3-MoE (2025): Qwen3 whose feed-forward parts are mixtures of experts.

use super::{Architecture, Sparse, window};
use crate::config::Config;
use crate::error::{Error, Result};

pub(super) fn architecture(config: &Config) -> Result<Architecture> {
    let bias = config.attention_bias;
    let mut model = Architecture { qkv_bias: bias, output_bias: bias, qk_norm: true, ..Architecture::plain(config)? };
    // Here a window in use is one of all layers, unlike in Qwen3.
    let width = window(config.sliding_window.filter(|_| config.use_sliding_window == Some(true)))?;
    let refuse = |problem: String| Err(Error::Config(problem));
    let sparse = Sparse {
        experts: config.num_experts().unwrap_or(128),
        top: config.num_experts_per_tok.unwrap_or(8),
        wide: config.moe_intermediate_size.unwrap_or(768),
        normed: config.norm_topk_prob.unwrap_or(false),
    };
    let Sparse { experts, top, wide, .. } = sparse;
    if wide == 0 {
        return refuse("moe_intermediate_size is 0; the least is 1".into());
    }
    if experts > 0 && !(1..=experts).contains(&top) {
        return refuse(format!("num_experts_per_tok is {top}; with {experts} experts possible are 1 to {experts}"));
    }
    let step = config.decoder_sparse_step.unwrap_or(1);
    if step == 0 {
        return refuse("decoder_sparse_step is 0; the least is 1, every layer is sparse".into());
    }
    let dense = config.mlp_only_layers.as_deref().unwrap_or_default();
    if let Some(layer) = dense.iter().find(|layer| **layer >= config.num_hidden_layers) {
        return refuse(format!("mlp_only_layers names layer {layer} of {}", config.num_hidden_layers));
    }
    for (index, layer) in model.layers.iter_mut().enumerate() {
        layer.window = width;
        layer.sparse = experts > 0 && !dense.contains(&index) && (index + 1) % step == 0;
    }
    model.sparse = Some(sparse).filter(|_| model.layers.iter().any(|layer| layer.sparse));
    Ok(model)
}
