//! Mistral (Jiang et al., 2023): Llama with a sliding window in every layer.

use crate::config::Config;
use crate::error::Result;
use crate::family::Family;
use crate::llama::{self, Biases};
use ringspan_candle::LanguageModel;
use ringspan_candle::model::ModelBuilder;
use std::sync::Arc;

pub(crate) const FAMILY: Family = Family { model_type: "mistral", keys: &[], fill_defaults: |json| json, model };

fn model(config: &Config, builder: &ModelBuilder) -> Result<Arc<dyn LanguageModel>> {
    llama::with(config, builder, &config.causal_mask(config.window()?), Biases::default())
}
