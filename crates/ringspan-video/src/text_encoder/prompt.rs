//! The tokens of a prompt.

use super::sentence_piece;
use crate::error::{Error, Result};
use ringspan_models::special_tokens;
use std::path::Path;
use tokenizers::Tokenizer;

/// The files of a tokenizer, of which one is enough.
const TOKENIZERS: [&str; 2] = ["tokenizer.json", "spiece.model"];

/// The tokenizer of a text encoder.
#[derive(Debug)]
pub struct PromptTokenizer {
    tokenizer: Tokenizer,
}

impl PromptTokenizer {
    /// Reads `tokenizer.json` of a folder, or of the folder `tokenizer` in it; where there is none, SentencePiece's `spiece.model`.
    ///
    /// # Errors
    /// Files that are missing or corrupt.
    pub fn open(folder: &Path) -> Result<Self> {
        let inside = folder.join("tokenizer");
        let folder = if inside.is_dir() { inside } else { folder.to_owned() };
        let [path, sentence_piece] = TOKENIZERS.map(|name| folder.join(name));
        if !path.exists() && sentence_piece.exists() {
            return Ok(Self { tokenizer: sentence_piece::tokenizer(&sentence_piece)? });
        }
        let bytes = std::fs::read(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
        let broken = |error: tokenizers::Error| Error::Format {
            path: path.clone(),
            problem: format!("not a tokenizer: {error}"),
        };
        let tokenizer = Tokenizer::from_bytes(&bytes).and_then(special_tokens::without_truncation).map_err(broken)?;
        Ok(Self { tokenizer })
    }

    /// The tokens of a prompt, with those that the tokenizer puts around a text. White space is reduced to single spaces, as
    /// diffusers does, but HTML entities such as `&amp;` stay as they are, and nothing is repaired as by ftfy. A prompt of more than
    /// `most` tokens loses its last ones, but keeps its end token.
    ///
    /// # Errors
    /// A tokenizer that fails, and a `most` of 0.
    pub fn encode(&self, prompt: &str, most: usize) -> Result<PromptTokens> {
        let clean = prompt.split_whitespace().collect::<Vec<_>>().join(" ");
        let wrong = |error: tokenizers::Error| Error::Input(format!("the prompt cannot be made tokens: {error}"));
        let mut ids = self.tokenizer.encode(clean, true).map_err(wrong)?.get_ids().to_vec();
        let (count, end) = (ids.len(), ids.last().copied());
        let Some(end) = end.filter(|_| most > 0) else {
            return Err(Error::Input(format!("a prompt of {count} tokens, of which {most} are kept, has none")));
        };
        if count > most {
            ids.truncate(most - 1);
            ids.push(end);
        }
        Ok(PromptTokens { ids, cut: count.saturating_sub(most) })
    }
}

/// The tokens of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptTokens {
    /// The tokens that are kept.
    pub ids: Vec<u32>,
    /// Number of tokens that were cut off.
    pub cut: usize,
}
