//! The description of a model family, which each family's file gives.

use crate::config::Config;
use crate::error::Result;
use ringspan_candle::LanguageModel;
use ringspan_candle::layers::{RmsNorm, VocabEmbedding, VocabHead};
use ringspan_candle::model::{CausalLm, Layer, ModelBuilder, Scope, Unit};
use serde_json::Value;
use std::sync::Arc;

/// A family of models that share an architecture.
pub(crate) struct Family {
    /// Its `model_type` in `config.json`.
    pub(crate) model_type: &'static str,
    /// The keys that it reads in addition to those of [`Config`].
    pub(crate) keys: &'static [&'static str],
    /// Fills in the defaults of transformers for absent keys, where they differ from those of [`Config`].
    pub(crate) fill_defaults: fn(Value) -> Value,
    /// Builds the model for a configuration.
    pub(crate) model: fn(&Config, &ModelBuilder) -> Result<Arc<dyn LanguageModel>>,
}

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
