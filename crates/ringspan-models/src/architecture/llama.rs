//! Llama 2 and 3 (Touvron et al., 2023; Grattafiori et al., 2024).

use super::Architecture;
use crate::config::Config;
use crate::error::Result;

pub(super) fn architecture(config: &Config) -> Result<Architecture> {
    Ok(Architecture {
        qkv_bias: config.attention_bias,
        output_bias: config.attention_bias,
        mlp_bias: config.mlp_bias,
        ..Architecture::plain(config)?
    })
}
