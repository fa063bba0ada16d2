//! The tokenizer in a GGUF file: byte-level BPE, as Llama 3 and Qwen have it.

use super::{broken, open};
use crate::error::Result;
use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use std::path::Path;
use tokenizers::Tokenizer;

/// Ways to cut text before pairs are merged: what files call it, what candle does, and whether whole words that are
/// tokens are taken as they are, and the text begins with a token, if the file does not say.
const CUTS: [(&str, &str, bool); 5] = [
    ("llama-bpe", "llama3", true),
    ("llama3", "llama3", true),
    ("llama-v3", "llama3", true),
    ("qwen2", "qwen2", false),
    ("gpt-2", "gpt2", false),
];

/// Builds the tokenizer of a GGUF file from its metadata.
///
/// # Errors
/// A file that is missing or corrupt, one without a tokenizer, and kinds that are unknown: a text cut in another way
/// than the model has learnt would be read, and be wrong.
pub fn tokenizer(path: &Path) -> Result<Tokenizer> {
    let (_, mut content) = open(path)?;
    let text = |key: &str| content.metadata.get(key).and_then(|value| value.to_string().ok()).cloned();
    let kind = text("tokenizer.ggml.model").unwrap_or_default();
    if kind != "gpt2" {
        let problem = format!("tokenizer.ggml.model '{kind}' is unknown: possible is gpt2, byte-level BPE");
        return Err(broken(path, &problem));
    }
    let cut = text("tokenizer.ggml.pre").unwrap_or_default();
    let Some((_, known, llama)) = CUTS.into_iter().find(|(name, ..)| *name == cut) else {
        let names = CUTS.map(|(name, ..)| name).join(", ");
        return Err(broken(path, &format!("tokenizer.ggml.pre '{cut}' is unknown: possible are {names}")));
    };
    content.metadata.insert("tokenizer.ggml.pre".into(), Value::String(known.into()));
    if llama {
        for key in ["tokenizer.ggml.ignore_merges", "tokenizer.ggml.add_bos_token"] {
            content.metadata.entry(key.into()).or_insert(Value::Bool(true));
        }
    }
    Tokenizer::from_gguf(&content).map_err(|error| broken(path, &format!("tokenizer: {error}")))
}
