//! Qwen2 (Yang et al., 2024): biases of queries, keys and values. Qwen3 (2025): their norms instead.

use super::{Architecture, sliding, window};
use crate::config::Config;
use crate::error::{Error, Result};

pub(super) fn qwen2(config: &Config) -> Result<Architecture> {
    let mut model = Architecture { qkv_bias: true, ..Architecture::plain(config)? };
    slide(config, &mut model)?;
    Ok(model)
}

pub(super) fn qwen3(config: &Config) -> Result<Architecture> {
    let bias = config.attention_bias;
    let mut model = Architecture { qkv_bias: bias, output_bias: bias, qk_norm: true, ..Architecture::plain(config)? };
    slide(config, &mut model)?;
    Ok(model)
}

/// Windows, where they are used: the files name one that is not.
fn slide(config: &Config, model: &mut Architecture) -> Result<()> {
    let width = window(config.sliding_window.filter(|_| config.use_sliding_window == Some(true)))?;
    let slides = match &config.layer_types {
        Some(types) => sliding(config, types)?,
        None => {
            let first = config.max_window_layers.unwrap_or(28);
            (0..config.num_hidden_layers).map(|layer| width.is_some() && layer >= first).collect()
        }
    };
    for (index, (layer, slides)) in model.layers.iter_mut().zip(slides).enumerate() {
        if slides && width.is_none() {
            return Err(Error::Config(format!(
                "layer {index} is sliding_attention, which needs use_sliding_window true and a sliding_window"
            )));
        }
        layer.window = width.filter(|_| slides);
    }
    Ok(())
}
