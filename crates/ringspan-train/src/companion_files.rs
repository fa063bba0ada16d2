//! The files next to a trained model's weights: tokenizer, chat template, and the generation config with its end tokens.

use crate::{
    config::TrainConfig,
    durable_file::write_file,
    error::{Error, Result, model_error},
    tokenizer::Tokenizer,
};
use ringspan_models::{ModelSource, special_tokens::GENERATION_CONFIG, tokenizer_config::TOKENIZER_CONFIG};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Files in which older versions of transformers keep special tokens, next to the tokenizer.
const LEGACY_TOKEN_FILES: [&str; 2] = ["special_tokens_map.json", "added_tokens.json"];
/// Ids of tokens that both `config.json` and [`GENERATION_CONFIG`] name.
const TOKEN_ID_KEYS: [&str; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"];

/// Writes these files into the folder `config.out`, so that generation uses the template and tokens of the training, and stops at
/// `end`, the token that ended the training's texts. `json` is the trained model's `config.json`.
///
/// # Errors
/// Files that cannot be read or written, and a damaged [`GENERATION_CONFIG`].
pub(crate) fn write(config: &TrainConfig, tokenizer: Option<&Tokenizer>, json: &Value, end: Option<u32>) -> Result<()> {
    if let Some(tokenizer) = tokenizer {
        write_file(&config.out.join("tokenizer.json"), tokenizer.to_json()?.as_bytes())?;
        write_tokenizer_files(config, tokenizer)?;
    }
    let generation = merge_generation_config(read_generation_config(config)?, json, end);
    if generation.is_empty() {
        return Ok(());
    }
    let text = serde_json::to_vec_pretty(&generation).map_err(model_error)?;
    write_file(&config.out.join(GENERATION_CONFIG), &text)
}

/// Writes the files that accompany `tokenizer.json`. The chat template of `--chat-template`, where given, replaces the
/// tokenizer's own.
fn write_tokenizer_files(config: &TrainConfig, tokenizer: &Tokenizer) -> Result<()> {
    let existing = |name: &str| tokenizer.folder().map(|folder| folder.join(name)).filter(|path| path.exists());
    let template = config.chat_template.clone().or_else(|| existing(CHAT_TEMPLATE));
    let other_files =
        [TOKENIZER_CONFIG, LEGACY_TOKEN_FILES[0], LEGACY_TOKEN_FILES[1]].map(|name| (name, existing(name)));
    let source = model_source(config)?;
    let embedded = source.map(|source| source.chat_template().map_err(model_error)).transpose()?.flatten();
    if let (None, Some(template)) = (&template, embedded) {
        write_file(&config.out.join(CHAT_TEMPLATE), template.source.as_bytes())?;
    }
    for (name, from) in [(CHAT_TEMPLATE, template)].into_iter().chain(other_files) {
        if let Some(from) = from {
            write_file(&config.out.join(name), &std::fs::read(&from).map_err(Error::io("read", &from))?)?;
        }
    }
    Ok(())
}

/// The model that training began with.
fn model_source(config: &TrainConfig) -> Result<Option<ModelSource>> {
    config.model.as_ref().map(|path| ModelSource::at(path).map_err(model_error)).transpose()
}

/// The generation config of the model that training began with; empty where there is none.
fn read_generation_config(config: &TrainConfig) -> Result<Map<String, Value>> {
    let source = model_source(config)?;
    let config_path = config.model_config.as_ref().filter(|_| config.tokenizer.is_none());
    let mut folders: Vec<&Path> = source.iter().flat_map(ModelSource::folders).collect();
    folders.extend(config_path.and_then(|path| if path.is_dir() { Some(path.as_path()) } else { path.parent() }));
    let files = folders.into_iter().map(|folder| folder.join(GENERATION_CONFIG));
    match files.into_iter().find(|path: &PathBuf| path.exists()) {
        None => Ok(Map::new()),
        Some(path) => {
            let bytes = std::fs::read(&path).map_err(Error::io("read", &path))?;
            let damaged = |e: serde_json::Error| Error::Model(format!("{}: {e}", path.display()));
            serde_json::from_slice(&bytes).map_err(damaged)
        }
    }
}

/// The generation config `base` with `end` among its `eos_token_id`s. Token ids that it lacks are taken from `config.json`, as
/// transformers does when it saves a model that has no generation config.
fn merge_generation_config(base: Map<String, Value>, config: &Value, end: Option<u32>) -> Map<String, Value> {
    let mut merged = base;
    for key in TOKEN_ID_KEYS {
        let missing = merged.get(key).is_none_or(Value::is_null);
        if let Some(value) = config.get(key).filter(|value| missing && !value.is_null()) {
            merged.insert(key.into(), value.clone());
        }
    }
    let Some(end) = end else { return merged };
    let mut ends = match merged.get("eos_token_id") {
        Some(Value::Array(ends)) => ends.clone(),
        Some(Value::Null) | None => Vec::new(),
        Some(one) => vec![one.clone()],
    };
    if !ends.contains(&json!(end)) {
        ends.insert(0, json!(end));
        merged.insert("eos_token_id".into(), if ends.len() == 1 { ends.remove(0) } else { ends.into() });
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_models_generation_config_stays_and_the_end_of_training_is_added() {
        let merged = |given: Value, config: Value, end| {
            let given = given.as_object().cloned().unwrap_or_default();
            Value::Object(merge_generation_config(given, &config, end))
        };
        let given = json!({"eos_token_id": [1, 2], "temperature": 0.6});
        assert_eq!(merged(given.clone(), json!({"eos_token_id": 9}), Some(2)), given);
        assert_eq!(merged(given.clone(), json!({}), None), given);
        assert_eq!(merged(given, json!({}), Some(3))["eos_token_id"], json!([3, 1, 2]));
        let config = json!({"eos_token_id": 7, "bos_token_id": 1, "pad_token_id": null, "hidden_size": 8});
        assert_eq!(merged(json!({}), config.clone(), Some(7)), json!({"bos_token_id": 1, "eos_token_id": 7}));
        assert_eq!(merged(json!({}), config, Some(8))["eos_token_id"], json!([8, 7]));
        assert_eq!(merged(json!({}), json!({}), Some(8)), json!({"eos_token_id": 8}));
        assert_eq!(merged(json!({}), json!({}), None), json!({}));
    }
}
