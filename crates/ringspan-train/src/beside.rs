//! The files next to a trained model's weights: tokenizer, chat template, and the generation config with its end tokens.

use crate::{
    checkpoint::write_file,
    config::TrainConfig,
    error::{Error, Result},
    setup::model_error,
    tokenizer::{TOKENIZER_CONFIG, Tokenizer},
};
use ringspan_models::{Origin, special_tokens::GENERATION_CONFIG};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

const TEMPLATE: &str = "chat_template.jinja";
/// Files in which older versions of transformers keep special tokens, next to the tokenizer.
const OLDER: [&str; 2] = ["special_tokens_map.json", "added_tokens.json"];
/// Ids of tokens that both `config.json` and [`GENERATION_CONFIG`] name.
const TOKENS: [&str; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"];

/// Writes these files into the folder `config.out`, so that generation uses the template and tokens of the training, and stops at
/// `end`, the token that ended the training's texts. `json` is the trained model's `config.json`.
///
/// # Errors
/// Files that cannot be read or written, and a damaged [`GENERATION_CONFIG`].
pub(crate) fn keep(config: &TrainConfig, tokenizer: Option<&Tokenizer>, json: &Value, end: Option<u32>) -> Result<()> {
    if let Some(tokenizer) = tokenizer {
        write_file(&config.out.join("tokenizer.json"), tokenizer.to_json()?.as_bytes())?;
        of_tokenizer(config, tokenizer)?;
    }
    let generation = generation(given(config)?, json, end);
    if generation.is_empty() {
        return Ok(());
    }
    let text = serde_json::to_vec_pretty(&generation).map_err(model_error)?;
    write_file(&config.out.join(GENERATION_CONFIG), &text)
}

/// Writes the files that accompany `tokenizer.json`. The chat template of `--chat-template`, where given, replaces the
/// tokenizer's own.
fn of_tokenizer(config: &TrainConfig, tokenizer: &Tokenizer) -> Result<()> {
    let beside = |name: &str| tokenizer.folder().map(|folder| folder.join(name)).filter(|path| path.exists());
    let template = config.chat_template.clone().or_else(|| beside(TEMPLATE));
    let others = [TOKENIZER_CONFIG, OLDER[0], OLDER[1]].map(|name| (name, beside(name)));
    let origin = origin_of(config)?;
    let of_file = origin.map(|origin| origin.chat_template().map_err(model_error)).transpose()?.flatten();
    if let (None, Some(template)) = (&template, of_file) {
        write_file(&config.out.join(TEMPLATE), template.source.as_bytes())?;
    }
    for (name, from) in [(TEMPLATE, template)].into_iter().chain(others) {
        if let Some(from) = from {
            write_file(&config.out.join(name), &std::fs::read(&from).map_err(Error::io("read", &from))?)?;
        }
    }
    Ok(())
}

/// The model that training began with.
fn origin_of(config: &TrainConfig) -> Result<Option<Origin>> {
    config.model.as_ref().map(|path| Origin::at(path).map_err(model_error)).transpose()
}

/// The generation config of the model that training began with; empty where there is none.
fn given(config: &TrainConfig) -> Result<Map<String, Value>> {
    let origin = origin_of(config)?;
    let shape = config.model_config.as_ref().filter(|_| config.tokenizer.is_none());
    let mut folders: Vec<&Path> = origin.iter().flat_map(Origin::folders).collect();
    folders.extend(shape.and_then(|path| if path.is_dir() { Some(path.as_path()) } else { path.parent() }));
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

/// The generation config `given` with `end` among its `eos_token_id`s. Token ids that it lacks are taken from `config.json`, as
/// transformers does when it saves a model that has no generation config.
fn generation(given: Map<String, Value>, config: &Value, end: Option<u32>) -> Map<String, Value> {
    let mut all = given;
    for key in TOKENS {
        let missing = all.get(key).is_none_or(Value::is_null);
        if let Some(said) = config.get(key).filter(|value| missing && !value.is_null()) {
            all.insert(key.into(), said.clone());
        }
    }
    let Some(end) = end else { return all };
    let mut ends = match all.get("eos_token_id") {
        Some(Value::Array(ends)) => ends.clone(),
        Some(Value::Null) | None => Vec::new(),
        Some(one) => vec![one.clone()],
    };
    if !ends.contains(&json!(end)) {
        ends.insert(0, json!(end));
        all.insert("eos_token_id".into(), if ends.len() == 1 { ends.remove(0) } else { ends.into() });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_stays_and_the_end_of_training_is_among_the_ends() {
        let of = |given: Value, config: Value, end| {
            let given = given.as_object().cloned().unwrap_or_default();
            Value::Object(generation(given, &config, end))
        };
        let given = json!({"eos_token_id": [1, 2], "temperature": 0.6});
        assert_eq!(of(given.clone(), json!({"eos_token_id": 9}), Some(2)), given);
        assert_eq!(of(given.clone(), json!({}), None), given);
        assert_eq!(of(given, json!({}), Some(3))["eos_token_id"], json!([3, 1, 2]));
        let config = json!({"eos_token_id": 7, "bos_token_id": 1, "pad_token_id": null, "hidden_size": 8});
        assert_eq!(of(json!({}), config.clone(), Some(7)), json!({"bos_token_id": 1, "eos_token_id": 7}));
        assert_eq!(of(json!({}), config, Some(8))["eos_token_id"], json!([8, 7]));
        assert_eq!(of(json!({}), json!({}), Some(8)), json!({"eos_token_id": 8}));
        assert_eq!(of(json!({}), json!({}), None), json!({}));
    }
}
