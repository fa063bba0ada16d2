//! Text to tokens and back: Hugging Face's `tokenizer.json`, and the byte-level tokenizer of new models.

use crate::{
    error::{Error, Result, template_error},
    token_windows::{self, PositionedToken, Window},
};
use ringspan_models::{
    special_tokens::{self, SpecialTokens},
    tokenizer_config::{self, TOKENIZER_CONFIG},
};
use serde_json::{Value, json};
use std::{
    fmt,
    ops::Range,
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// Names under which models keep the token that ends a document, in order of preference, for those that do not say.
const END_OF_TEXT: [&str; 6] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>"];

/// Sources that name the token that ends a document, in words: a configuration file, or the token's own name.
const FROM_CONFIG: &str = "eos_token of tokenizer_config.json";
const FROM_NAME: &str = "by its name";

/// Number of tokens of the byte-level tokenizer.
pub(crate) const BYTE_LEVEL_TOKENS: usize = 257;

/// The token that ends a document, and the source that names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndToken {
    /// The token's id.
    pub id: u32,
    /// The token's spelling.
    pub token: String,
    /// The source that names the token, in words.
    pub source: &'static str,
}

impl fmt::Display for EndToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (token {}, {})", self.token, self.id, self.source)
    }
}

/// A tokenizer with the special tokens that surround a text, and the token that ends a document.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    special_tokens: SpecialTokens,
    /// A copy that encodes text which spells a special token as that token. It is large, so it is made on first use.
    with_special_tokens: OnceLock<tokenizers::Tokenizer>,
    end: Option<EndToken>,
    path: PathBuf,
    /// The folder of the files that belong to it; none for the byte-level tokenizer, and for one that a GGUF file holds.
    folder: Option<PathBuf>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. Files next to it belong to it: the chat template, the names of its tokens. Documents end with
    /// the `eos_token` of `tokenizer_config.json`, else with the first `eos_token_id` of `generation_config.json` or
    /// `config.json` that is a special token, else with a special token of a usual name.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the file is missing or damaged, [`Error::Template`] and [`Error::Model`] for a damaged file
    /// next to it.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
        let folder = path.parent().map(Path::to_path_buf);
        let mut read = Self { folder, ..Self::parse(&bytes, path)? };
        let Some(folder) = &read.folder else { return Ok(read) };
        let strings = tokenizer_config::strings(&folder.join(TOKENIZER_CONFIG)).map_err(template_error)?;
        let named = strings.get("eos_token").cloned();
        if let Some(named) = named.as_ref().and_then(Value::as_str)
            && let Some(id) = read.inner.token_to_id(named)
        {
            read.end = Some(EndToken { id, token: named.into(), source: FROM_CONFIG });
        }
        let config = ringspan_models::folder::config_json(folder).ok().unwrap_or_default();
        let ends = special_tokens::end_tokens(&[folder.as_path()], &config).map_err(|e| Error::Model(e.to_string()))?;
        Ok(read.or_end_tokens(&ends))
    }

    /// This tokenizer, with the first special token of `ends` (a model's `eos_token_id`) as the token that ends documents, unless
    /// a file next to the tokenizer names one.
    #[must_use]
    pub fn or_end_tokens(mut self, ends: &[u32]) -> Self {
        let may_replace = self.end.as_ref().is_none_or(|end| end.source == FROM_NAME);
        if let Some(end) = ends.iter().find_map(|&id| self.end_if_special(id, "eos_token_id")).filter(|_| may_replace) {
            self.end = Some(end);
        }
        self
    }

    fn end_if_special(&self, id: u32, source: &'static str) -> Option<EndToken> {
        self.special_token(id).map(|token| EndToken { id, token: token.into(), source })
    }

    /// The spelling of a special token; none for other tokens.
    pub(crate) fn special_token(&self, id: u32) -> Option<&str> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        added.get(&id).filter(|token| token.special).map(|token| token.content.as_str())
    }

    /// The spelling of a token.
    pub(crate) fn spelling(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// A tokenizer of 257 tokens: token b is the byte b, token 256 is `<|endoftext|>`. `path` names it in messages.
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
        Self::new(inner, path)
    }

    /// Wraps a loaded tokenizer, without the truncation and the padding that it may ask for; `path` names it in messages.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for a post-processor that fails.
    pub fn new(inner: tokenizers::Tokenizer, path: &Path) -> Result<Self> {
        let wrong = |e: tokenizers::Error| Error::Tokenizer { path: path.into(), problem: e.to_string() };
        let mut inner = special_tokens::without_truncation(inner).map_err(wrong)?;
        // Text that spells a special token stays text: data cannot end a document by naming the token.
        inner.set_encode_special_tokens(true);
        let special_tokens = SpecialTokens::of(&inner).map_err(wrong)?;
        let read = Self {
            inner,
            special_tokens,
            with_special_tokens: OnceLock::new(),
            end: None,
            path: path.into(),
            folder: None,
        };
        let usual = END_OF_TEXT.iter().filter_map(|name| read.inner.token_to_id(name));
        let end = usual.into_iter().find_map(|id| read.end_if_special(id, FROM_NAME));
        Ok(Self { end, ..read })
    }

    /// The tokens of `text`, without special tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the model of the tokenizer has no token for a part of the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        if token_windows::is_long(text) {
            return token_windows::encode(text, |part| self.encode_part(part));
        }
        match self.inner.encode_fast(text, false) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(e) => Err(self.encoding_error(&e)),
        }
    }

    /// The tokens of a window of a text, each with the byte at which it begins. Where the window is the whole text, nothing is
    /// joined to it, and all positions are 0.
    pub(crate) fn encode_window(&self, window: &Window) -> Result<Vec<PositionedToken>> {
        match window.is_whole() {
            true => Ok(self.encode(&window.text)?.into_iter().map(|id| (id, 0)).collect()),
            false => self.encode_part(&window.text),
        }
    }

    /// The tokens of a part of a text, each with the byte at which it begins.
    pub(crate) fn encode_part(&self, part: &str) -> Result<Vec<PositionedToken>> {
        let encoding = self.inner.encode(part, false).map_err(|e| self.encoding_error(&e))?;
        Ok(encoding.get_ids().iter().zip(encoding.get_offsets()).map(|(&id, &(start, _))| (id, start)).collect())
    }

    fn encoding_error(&self, error: &tokenizers::Error) -> Error {
        Error::Tokenizer { path: self.path.clone(), problem: error.to_string() }
    }

    /// Special tokens that stand before a text, such as `<s>`.
    #[must_use]
    pub fn prefix_tokens(&self) -> &[u32] {
        &self.special_tokens.prefix
    }

    /// Special tokens that stand after a text: the post-processor's, then the one that ends a document unless it is among them.
    #[must_use]
    pub fn suffix_tokens(&self) -> Vec<u32> {
        let mut suffix = self.special_tokens.suffix.clone();
        suffix.extend(self.end_of_text().filter(|end| !suffix.contains(end)));
        suffix
    }

    /// The tokens of text that a chat template wrote, in which special tokens are spelled out, each with its range of bytes.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the model of the tokenizer has no token for a part of the text.
    pub(crate) fn encode_with_special_tokens(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        let with_special_tokens = self.with_special_tokens.get_or_init(|| {
            let mut inner = self.inner.clone();
            inner.set_encode_special_tokens(false);
            inner
        });
        let encoding = with_special_tokens
            .encode(text, false)
            .map_err(|e| Error::Tokenizer { path: self.path.clone(), problem: e.to_string() })?;
        let token = |(&id, &(start, end)): (&u32, &(usize, usize))| match start < end {
            true => (id, start..end),
            // Some tokenizers trim spaces: a token of nothing but spaces has an empty range, and takes the byte before it.
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
        self.end.as_ref().map(|end| end.id)
    }

    /// Like [`end_of_text`](Self::end_of_text), with the token's spelling and the source that names it.
    #[must_use]
    pub fn end_token(&self) -> Option<&EndToken> {
        self.end.as_ref()
    }

    /// The folder of the files that belong to the tokenizer, where there is one.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The file or folder of the tokenizer, or its name in messages.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of tokens, added ones included.
    #[must_use]
    pub fn vocabulary_size(&self) -> usize {
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
        assert_eq!((tokenizer.end_of_text(), tokenizer.vocabulary_size()), (Some(256), BYTE_LEVEL_TOKENS));
        assert_eq!(tokenizer.decode(&[104, 105, 256]).unwrap(), "hi");
    }

    #[test]
    fn a_saved_tokenizer_is_the_same_again() {
        let tokenizer = Tokenizer::byte_level(Path::new("byte-level")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, tokenizer.to_json().unwrap()).unwrap();
        let read_back = Tokenizer::read(&path).unwrap();
        assert_eq!(read_back.encode("Ünï\n").unwrap(), tokenizer.encode("Ünï\n").unwrap());
        assert_eq!(read_back.to_json().unwrap(), tokenizer.to_json().unwrap());
    }

    /// A tokenizer in which `</s>` is an HTML tag, as in Gemma's, with two special tokens.
    fn with_tag(folder: &Path) -> PathBuf {
        let bytes = Tokenizer::byte_level(Path::new("bytes")).unwrap();
        let mut json: Value = serde_json::from_str(&bytes.to_json().unwrap()).unwrap();
        let token = |id: u32, content: &str, special: bool| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special})
        };
        json["added_tokens"] =
            json!([token(256, "</s>", false), token(257, "<eos>", true), token(258, "<turn>", true)]);
        let path = folder.join("tokenizer.json");
        std::fs::write(&path, json.to_string()).unwrap();
        path
    }

    #[test]
    fn documents_end_with_what_the_files_say_and_never_with_a_tag() {
        let folder = tempfile::tempdir().unwrap();
        let path = with_tag(folder.path());
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let end = || Tokenizer::read(&path).unwrap().end_token().map(|end| (end.token.clone(), end.source));
        assert_eq!(end(), Some(("<eos>".into(), FROM_NAME)));
        write("config.json", r#"{"eos_token_id": [256, 258]}"#);
        assert_eq!(end(), Some(("<turn>".into(), "eos_token_id")));
        write("generation_config.json", r#"{"eos_token_id": 257}"#);
        assert_eq!(end(), Some(("<eos>".into(), "eos_token_id")));
        write("tokenizer_config.json", r#"{"eos_token": {"content": "<turn>"}}"#);
        assert_eq!(end(), Some(("<turn>".into(), FROM_CONFIG)));
        // The files next to a tokenizer win over the `eos_token_id` of the model in an adapter's folder.
        assert_eq!(Tokenizer::read(&path).unwrap().or_end_tokens(&[257]).end_of_text(), Some(258));
        write("generation_config.json", "{");
        let message = Tokenizer::read(&path).unwrap_err().to_string();
        assert!(message.contains("generation_config.json"), "{message}");
    }

    #[test]
    fn a_long_text_is_whole_whatever_the_file_asks_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = with_tag(folder.path());
        let mut json: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        json["truncation"] = json!({"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0});
        json["padding"] = json!({"strategy": {"Fixed": 32}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 257, "pad_type_id": 0, "pad_token": "<eos>"});
        std::fs::write(&path, json.to_string()).unwrap();
        let tokenizer = Tokenizer::read(&path).unwrap();
        for len in [3, 100] {
            let text = "x".repeat(len);
            assert_eq!(tokenizer.encode(&text).unwrap().len(), len);
            assert_eq!(tokenizer.encode_with_special_tokens(&text).unwrap().len(), len);
        }
        let saved: Value = serde_json::from_str(&tokenizer.to_json().unwrap()).unwrap();
        assert_eq!((&saved["truncation"], &saved["padding"]), (&Value::Null, &Value::Null));
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
