//! `tokenizer_config.json`, the file of special tokens and chat templates next to a tokenizer.

use crate::error::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// Hugging Face's file next to `tokenizer.json`: special tokens by purpose, and often the chat template.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// The special tokens in `tokenizer_config.json`, as strings, and its chat template; empty where there is no such file.
///
/// # Errors
/// A file that cannot be read, or is no JSON object.
pub fn strings(path: &Path) -> Result<serde_json::Map<String, Value>> {
    if !path.exists() {
        return Ok(serde_json::Map::new());
    }
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
    let damaged = |e: serde_json::Error| Error::Format { path: path.into(), problem: format!("damaged: {e}") };
    let config: serde_json::Map<String, Value> = serde_json::from_str(&text).map_err(damaged)?;
    let token = |(key, value): (String, Value)| match value {
        Value::String(_) => Some((key, value)),
        Value::Array(_) if key == "chat_template" => Some((key, value)),
        Value::Object(token) => token.get("content").filter(|content| content.is_string()).map(|c| (key, c.clone())),
        _ => None,
    };
    let is_wanted = |(key, _): &(String, Value)| key.ends_with("_token") || key == "chat_template";
    Ok(config.into_iter().filter(is_wanted).filter_map(token).collect())
}
