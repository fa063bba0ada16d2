//! The supported model families, by their `model_type` at Hugging Face.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::{
    deepseek, gemma2, gemma3, glm4, gpt_oss, granite, llama, mistral, mixtral, olmo2, phi3, qwen2, qwen3, qwen3_moe,
    smollm3,
};
use ringspan_candle::Model;
use ringspan_candle::layers::{RmsNorm, VocabEmbedding, VocabHead};
use ringspan_candle::model::{CausalLm, Layer, ModelBuilder, ModelParameters, Scope, Unit};
use serde_json::Value;
use std::sync::Arc;

/// A family of models that share an architecture.
pub(crate) struct Family {
    /// Its `model_type` in `config.json`.
    pub(crate) model_type: &'static str,
    /// The keys that it reads in addition to those of [`Config`].
    pub(crate) keys: &'static [&'static str],
    /// Fills in the defaults of transformers for absent keys, where they differ from those of [`Config`].
    pub(crate) completed: fn(Value) -> Value,
    /// Builds the model for a configuration.
    pub(crate) model: fn(&Config, &ModelBuilder) -> Result<Arc<dyn Model>>,
}

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

/// Declares the keys of `config.json` that a family reads in addition to those of [`Config`], with a list of their names.
macro_rules! family_keys {
    ($(#[$about:meta])* $vis:vis struct $name:ident { $($(#[$of_key:meta])* $key:ident: $type:ty,)* }) => {
        $(#[$about])*
        #[derive(Debug, serde::Deserialize)]
        $vis struct $name { $($(#[$of_key])* $key: $type,)* }

        impl $name {
            $vis const NAMES: &'static [&'static str] = &[$(stringify!($key)),*];
        }
    };
}
pub(crate) use family_keys;

fn family(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.model_type == model_type)
}

/// The keys that a family reads in addition to those of [`Config`].
pub(crate) fn keys(model_type: &str) -> &'static [&'static str] {
    family(model_type).map_or(&[], |family| family.keys)
}

/// Builds the model for a configuration, and lists its parameters by unit.
///
/// # Errors
/// A `model_type` that is unknown, and settings that its family cannot compute.
pub(crate) fn model(config: &Config) -> Result<(Arc<dyn Model>, ModelParameters)> {
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
pub(crate) fn completed(json: Value) -> Value {
    let name = match json["model_type"].as_str() {
        // Its language model has a `model_type` of its own.
        Some("gemma3") => "gemma3_text",
        Some(name) => name,
        None => return json,
    };
    family(name).map_or_else(|| json.clone(), |family| (family.completed)(json.clone()))
}

/// Fills in these defaults for absent keys of `config.json`.
pub(crate) fn with_defaults(mut json: Value, defaults: Value) -> Value {
    if let (Value::Object(keys), Value::Object(defaults)) = (&mut json, defaults) {
        for (key, value) in defaults {
            keys.entry(key).or_insert(value);
        }
    }
    json
}

/// Puts layers into the frame that most models share: embedding, layers, norm, and an output head that may be the embedding.
pub(crate) fn causal_lm<L: Layer>(
    config: &Config,
    builder: &ModelBuilder,
    norm: impl Fn(&Scope) -> RmsNorm,
    mut layer: impl FnMut(usize, &Scope) -> L,
) -> CausalLm<L> {
    let Config { vocab_size, hidden_size, num_hidden_layers, tie_word_embeddings, .. } = *config;
    let embed_tokens = builder.unit(Unit::Embedding, "model.embed_tokens");
    let embed_tokens = VocabEmbedding::new(&embed_tokens, vocab_size, hidden_size);
    let layers = (0..num_hidden_layers)
        .map(|index| layer(index, &builder.unit(Unit::Layer(index), format!("model.layers.{index}"))))
        .collect();
    let norm = norm(&builder.unit(Unit::Head, "model.norm"));
    let lm_head = match tie_word_embeddings {
        true => VocabHead::tied_to(&embed_tokens),
        false => VocabHead::new(&builder.unit(Unit::Head, "lm_head"), vocab_size, hidden_size),
    };
    CausalLm { embed_tokens, layers, norm, lm_head }
}
