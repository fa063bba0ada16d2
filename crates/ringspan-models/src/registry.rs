//! The models there are, by the names that Hugging Face gives them.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::{
    deepseek, gemma2, gemma3, glm4, gpt_oss, granite, llama, mistral, mixtral, olmo2, phi3, qwen2, qwen3, qwen3_moe,
    smollm3,
};
use ringspan_candle::Model;
use ringspan_candle::layers::{RmsNorm, VocabEmbedding, VocabHead};
use ringspan_candle::model::{CausalLm, Layer, ModelBuilder, Scope, Unit, UnitParameters};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A family of models.
pub(crate) struct Family {
    /// Its name in `config.json`.
    pub(crate) model_type: &'static str,
    /// The keys that it reads beside those of [`Config`].
    pub(crate) keys: &'static [&'static str],
    /// `config.json` with what transformers takes for absent keys, where that is not what [`Config`] takes.
    pub(crate) completed: fn(Value) -> Value,
    /// Makes the model of a configuration.
    pub(crate) model: fn(&Config, &ModelBuilder) -> Result<Arc<dyn Model>>,
}

/// The families there are.
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

/// Declares the keys of `config.json` that a family reads beside those of [`Config`], with a list of their names.
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

/// The keys that a family reads beside those of [`Config`].
pub(crate) fn keys(model_type: &str) -> &'static [&'static str] {
    family(model_type).map_or(&[], |family| family.keys)
}

/// The model of a configuration, and its parameters.
///
/// # Errors
/// A model that is unknown, and what it cannot compute.
pub(crate) fn model(config: &Config) -> Result<(Arc<dyn Model>, BTreeMap<Unit, UnitParameters>)> {
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

/// `config.json` with what transformers takes for absent keys, where that depends on the model. If the model sees more than
/// text, the text's part.
pub(crate) fn completed(json: Value) -> Value {
    let name = match json["model_type"].as_str() {
        // Its text has a type of its own.
        Some("gemma3") => "gemma3_text",
        Some(name) => name,
        None => return json,
    };
    family(name).map_or_else(|| json.clone(), |family| (family.completed)(json.clone()))
}

/// `config.json` with these values of keys that are absent.
pub(crate) fn with_defaults(mut json: Value, defaults: Value) -> Value {
    if let (Value::Object(keys), Value::Object(defaults)) = (&mut json, defaults) {
        for (key, value) in defaults {
            keys.entry(key).or_insert(value);
        }
    }
    json
}

/// What most models have around their layers: embedding, norm, and an output head that may be the embedding.
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
