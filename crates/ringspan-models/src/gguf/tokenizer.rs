//! Tokenizers and chat templates in GGUF files.

mod byte_level;
mod sentence_piece;

use super::file::GgufFile;
use crate::error::Result;
use candle_core::quantized::gguf_file::Value;
use serde_json::json;
use std::path::Path;
use tokenizers::Tokenizer;

const MODEL: &str = "tokenizer.ggml.model";

/// Builds the tokenizer of a GGUF file from its metadata.
///
/// # Errors
/// A file that is missing or corrupt, one without a tokenizer, and kinds that are unknown: with another way of splitting text
/// than the model has learnt, text would still become tokens, but wrong ones.
pub fn tokenizer(path: &Path) -> Result<Tokenizer> {
    let file = GgufFile::open(path)?;
    let kind = text(&file, MODEL).unwrap_or_default().to_owned();
    match kind.as_str() {
        "gpt2" => byte_level::tokenizer(file),
        "llama" => sentence_piece::tokenizer(&file),
        _ => Err(file.broken(&format!(
            "{MODEL} '{kind}' is unknown: possible are gpt2, byte-level BPE, and llama, SentencePiece's BPE"
        ))),
    }
}

/// Whether a GGUF file has a tokenizer.
pub(crate) fn has_tokenizer(path: &Path) -> Result<bool> {
    Ok(text(&GgufFile::open(path)?, MODEL).is_some())
}

/// A chat template, by which a model's conversations become text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatTemplate {
    /// The template's source in Jinja.
    pub source: String,
    /// The texts of special tokens, by the template's variables for them: `bos_token` and so on.
    pub tokens: serde_json::Map<String, serde_json::Value>,
}

/// The chat template of a GGUF file, if it has one.
///
/// # Errors
/// A file that is missing or corrupt.
pub fn chat_template(path: &Path) -> Result<Option<ChatTemplate>> {
    let file = GgufFile::open(path)?;
    let Some(source) = text(&file, "tokenizer.chat_template").map(str::to_owned) else { return Ok(None) };
    let mut tokens = serde_json::Map::new();
    if let Some(Value::Array(all)) = file.metadata.get("tokenizer.ggml.tokens") {
        for (name, key) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")] {
            let number = id(&file, &format!("tokenizer.ggml.{key}_token_id"));
            if let Some(Value::String(token)) = number.and_then(|number| all.get(number as usize)) {
                tokens.insert(format!("{name}_token"), json!(token));
            }
        }
    }
    Ok(Some(ChatTemplate { source, tokens }))
}

fn text<'a>(file: &'a GgufFile, key: &str) -> Option<&'a str> {
    file.metadata.get(key).and_then(|value| value.to_string().ok()).map(String::as_str)
}

fn id(file: &GgufFile, key: &str) -> Option<u32> {
    file.metadata.get(key).and_then(|value| value.to_u32().ok())
}

fn flag(file: &GgufFile, key: &str) -> Option<bool> {
    file.metadata.get(key).and_then(|value| value.to_bool().ok())
}
