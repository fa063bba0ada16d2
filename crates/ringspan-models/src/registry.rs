//! The supported model families, by their `model_type` at Hugging Face.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::family::Family;
use crate::{
    deepseek, gemma2, gemma3, glm4, gpt_oss, granite, llama, mistral, mixtral, olmo2, phi3, qwen2, qwen3, qwen3_moe,
    smollm3,
};
use ringspan_candle::LanguageModel;
use ringspan_candle::model::{ModelBuilder, ModelParameters};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::sync::Arc;

/// All supported families.
const FAMILIES: [Family; 16] = [
    llama::FAMILY,
    qwen2::FAMILY,
    qwen3::FAMILY,
    qwen3_moe::FAMILY,
    mistral::FAMILY,
    mixtral::FAMILY,
    gemma2::FAMILY,
    gemma3::FAMILY,
    glm4::FAMILY,
    granite::FAMILY,
    olmo2::FAMILY,
    phi3::FAMILY,
    smollm3::FAMILY,
    deepseek::V2,
    deepseek::V3,
    gpt_oss::FAMILY,
];

fn family(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.model_type == model_type)
}

impl<'de> Deserialize<'de> for Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let json = with_family_defaults(Value::deserialize(deserializer)?);
        let config = Config::deserialize(json).map_err(serde::de::Error::custom)?;
        let read = keys(&config.model_type);
        Ok(config.with_family_keys(read))
    }
}

impl Config {
    /// Refuses models that this crate cannot compute, and sizes that contradict each other.
    ///
    /// # Errors
    /// The first problem found, with the values that are possible.
    pub fn check(&self) -> Result<()> {
        model(self).map(drop)
    }
}

/// The keys that a family reads in addition to those of [`Config`].
fn keys(model_type: &str) -> &'static [&'static str] {
    family(model_type).map_or(&[], |family| family.keys)
}

/// Builds the model for a configuration, and lists its parameters by unit.
///
/// # Errors
/// A `model_type` that is unknown, and settings that its family cannot compute.
pub(crate) fn model(config: &Config) -> Result<(Arc<dyn LanguageModel>, ModelParameters)> {
    config.check_sizes()?;
    let Some(family) = family(&config.model_type) else {
        return Err(Error::Config(format!(
            "model_type '{}' is unknown: possible are {}, gemma3 (its text)",
            config.model_type,
            FAMILIES.map(|family| family.model_type).join(", ")
        )));
    };
    let builder = ModelBuilder::new();
    let model = (family.model)(config, &builder)?;
    Ok((model, builder.finish()))
}

/// Fills in the defaults of transformers for absent keys of `config.json`, which depend on the family. Of a multimodal model,
/// it returns the configuration of the language model.
pub(crate) fn with_family_defaults(json: Value) -> Value {
    let name = match json["model_type"].as_str() {
        // Its language model has a `model_type` of its own.
        Some("gemma3") => "gemma3_text",
        Some(name) => name,
        None => return json,
    };
    family(name).map_or_else(|| json.clone(), |family| (family.fill_defaults)(json.clone()))
}
