//! Mistral (Jiang et al., 2023): Llama with a window in every layer.

use super::{Architecture, window};
use crate::config::Config;
use crate::error::Result;

pub(super) fn architecture(config: &Config) -> Result<Architecture> {
    let mut model = Architecture::plain(config)?;
    let window = window(config.sliding_window)?;
    model.layers.iter_mut().for_each(|layer| layer.window = window);
    Ok(model)
}
