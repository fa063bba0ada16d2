//! Text to tokens and back: Hugging Face's `tokenizer.json`, and the byte-level one a new model starts with.

use crate::{
    data::special_tokens,
    error::{Error, Result},
};
use serde_json::json;
use std::{
    ops::Range,
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// Names under which models keep the token that ends a document, in order of preference.
const END_OF_TEXT: [&str; 6] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>"];

/// What Hugging Face keeps beside `tokenizer.json`: special tokens by what they are for, and often the chat template.
pub(crate) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// Tokens of the byte-level tokenizer.
pub(crate) const BYTE_LEVEL: usize = 257;

/// A tokenizer and the token that ends a document.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The same, to which text that spells a special token is that token. Large, so made when it is needed.
    templated: OnceLock<tokenizers::Tokenizer>,
    end_of_text: Option<u32>,
    path: PathBuf,
    /// Where the files lie that belong to it; none for bytes, and for what a GGUF file holds.
    folder: Option<PathBuf>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. What lies beside it belongs to it: the chat template, the names of its tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the file is missing or damaged.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
        let folder = path.parent().map(Path::to_path_buf);
        Ok(Self { folder, ..Self::parse(&bytes, path)? })
    }

    /// 257 tokens: token b is the byte b, token 256 is `<|endoftext|>`. `path` names it in messages.
    ///
    /// # Errors
    /// Never in practice: the tokenizer is the same each time.
    pub fn byte_level(path: &Path) -> Result<Self> {
        let vocabulary: serde_json::Map<_, _> =
            byte_characters().iter().enumerate().map(|(byte, c)| (c.to_string(), json!(byte))).collect();
        let end = json!({"id": 256, "content": END_OF_TEXT[0], "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true});
        let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [end],
            "normalizer": null, "pre_tokenizer": level, "post_processor": null, "decoder": level,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocabulary, "merges": []}});
        Self::parse(tokenizer.to_string().as_bytes(), path)
    }

    fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        let inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|e| Error::Tokenizer { path: path.into(), problem: e.to_string() })?;
        Ok(Self::new(inner, path))
    }

    /// A tokenizer that is here; `path` names it in messages.
    #[must_use]
    pub fn new(mut inner: tokenizers::Tokenizer, path: &Path) -> Self {
        // Text that spells a special token stays text: data cannot end a document by naming the token.
        inner.set_encode_special_tokens(true);
        let end_of_text = END_OF_TEXT.iter().find_map(|name| inner.token_to_id(name));
        Self { inner, templated: OnceLock::new(), end_of_text, path: path.into(), folder: None }
    }

    /// The tokens of `text`, without special tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the model of the tokenizer has no token for a part of the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self.inner.encode_fast(text, false) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(e) => Err(Error::Tokenizer { path: self.path.clone(), problem: e.to_string() }),
        }
    }

    /// The tokens of what a template wrote, in which special tokens are spelled out, with the bytes each stands for.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the model of the tokenizer has no token for a part of the text.
    pub(crate) fn encode_templated(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        let templated = self.templated.get_or_init(|| {
            let mut inner = self.inner.clone();
            inner.set_encode_special_tokens(false);
            inner
        });
        let encoding = templated
            .encode(text, false)
            .map_err(|e| Error::Tokenizer { path: self.path.clone(), problem: e.to_string() })?;
        let token = |(&id, &(start, end)): (&u32, &(usize, usize))| match start < end {
            true => (id, start..end),
            // Some tokenizers cut spaces off: a token of nothing but spaces stands for the byte before its empty place.
            false => (id, end.saturating_sub(1)..end),
        };
        Ok(encoding.get_ids().iter().zip(encoding.get_offsets()).map(token).collect())
    }

    /// The spelling of each special token.
    pub(crate) fn special_tokens(&self) -> impl Iterator<Item = &str> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        added.values().filter(|token| token.special).map(|token| token.content.as_str())
    }

    /// The text of `tokens`; special tokens are left out, broken UTF-8 becomes the replacement character.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the decoder fails.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.inner
            .decode(tokens, true)
            .map_err(|e| Error::Tokenizer { path: self.path.clone(), problem: e.to_string() })
    }

    /// The token that ends a document, when the tokenizer has one.
    #[must_use]
    pub fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }

    /// Tokens that end a text: the one that its [`TOKENIZER_CONFIG`] calls so, and the one that documents end with here.
    ///
    /// # Errors
    /// [`Error::Template`] for a damaged file, [`Error::Io`] when the system refuses.
    pub(crate) fn ends(&self) -> Result<Vec<u32>> {
        let named = match &self.folder {
            Some(folder) => special_tokens(&folder.join(TOKENIZER_CONFIG))?.remove("eos_token"),
            None => None,
        };
        let named = named.and_then(|name| self.inner.token_to_id(name.as_str()?));
        let mut ends: Vec<u32> = named.into_iter().chain(self.end_of_text).collect();
        ends.dedup();
        Ok(ends)
    }

    /// The folder of the files that belong to it, where there is one.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Where it came from.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of tokens, added ones included.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The `tokenizer.json` of this tokenizer.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when it cannot be serialised.
    pub fn to_json(&self) -> Result<String> {
        self.inner.to_string(true).map_err(|e| Error::Tokenizer { path: self.path.clone(), problem: e.to_string() })
    }
}

/// The printable character that stands for each byte in byte-level vocabularies: printable Latin-1 bytes stand for
/// themselves, the others are numbered from U+0100 on in byte order (the table GPT-2 introduced).
fn byte_characters() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|byte| {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable {
            byte as u32
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_tokens_are_the_bytes_and_come_back_as_the_text() {
        let tokenizer = Tokenizer::byte_level(Path::new("byte-level")).unwrap();
        let every_character: String = (0..0x250).filter_map(char::from_u32).chain("日本 🦀\r\n".chars()).collect();
        for text in ["", "  fn main() {\n\t}\n", "<|endoftext|>", &every_character] {
            let tokens = tokenizer.encode(text).unwrap();
            let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
            assert_eq!(tokens, bytes);
            assert_eq!(tokenizer.decode(&tokens).unwrap(), text);
        }
        assert_eq!((tokenizer.end_of_text(), tokenizer.vocabulary()), (Some(256), BYTE_LEVEL));
        assert_eq!(tokenizer.decode(&[104, 105, 256]).unwrap(), "hi");
    }

    #[test]
    fn a_saved_tokenizer_is_the_same_again() {
        let tokenizer = Tokenizer::byte_level(Path::new("byte-level")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, tokenizer.to_json().unwrap()).unwrap();
        let again = Tokenizer::read(&path).unwrap();
        assert_eq!(again.encode("Ünï\n").unwrap(), tokenizer.encode("Ünï\n").unwrap());
        assert_eq!(again.to_json().unwrap(), tokenizer.to_json().unwrap());
    }

    #[test]
    fn a_damaged_tokenizer_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, "{\"version\": \"1.0\"").unwrap();
        let message = Tokenizer::read(&path).unwrap_err().to_string();
        assert!(message.contains("tokenizer.json"), "{message}");
    }
}
