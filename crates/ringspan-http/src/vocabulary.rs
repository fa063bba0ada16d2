//! The tokens of a tokenizer as bytes, for log-probabilities and grammars.

use ringspan_serve::{Detokenize, Error};
use std::collections::HashMap;
use tokenizers::{DecoderWrapper, ModelWrapper, NormalizerWrapper, Tokenizer};

/// The character by which SentencePiece writes a space.
const SPACE: char = '\u{2581}';

/// Each token's bytes, and the tokenizer itself.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    tokenizer: Tokenizer,
    /// For each id its bytes in a text; empty for ids without a token.
    bytes: Vec<Vec<u8>>,
    /// Whether a token is special, and so is left out of texts.
    special: Vec<bool>,
    /// The most bytes of a text that a token stands for, if that is known.
    longest: Option<usize>,
}

/// Unicode normalization may replace characters by shorter ones, which makes a text at most this many times shorter: 𝐀 has 4 bytes, A 1.
const SHORTENED: usize = 4;

impl Vocabulary {
    /// The vocabulary of a tokenizer, of `size` ids: models may have more than their tokenizer.
    pub(crate) fn new(tokenizer: Tokenizer, size: usize) -> Self {
        let byte_level = is_byte_level(&tokenizer);
        let alphabet = byte_alphabet();
        let mut bytes: Vec<Vec<u8>> = (0..size)
            .map(|id| match tokenizer.id_to_token(id as u32) {
                None => Vec::new(),
                Some(token) if byte_level => byte_level_bytes(&token, &alphabet),
                Some(token) => sentence_piece_bytes(&token),
            })
            .collect();
        let mut special = vec![false; size];
        for (id, token) in tokenizer.get_added_tokens_decoder() {
            if let Some(place) = bytes.get_mut(id as usize) {
                *place = token.content.into_bytes();
                special[id as usize] = token.special;
            }
        }
        // Where each byte has a token, no model drops any, and no token stands for unknown words of any length.
        let all_bytes = match tokenizer.get_model() {
            ModelWrapper::BPE(model) => byte_level || model.byte_fallback,
            _ => false,
        };
        let all_bytes = all_bytes && tokenizer.get_normalizer().is_none_or(keeps_characters);
        let longest = bytes.iter().map(Vec::len).max().filter(|longest| all_bytes && *longest > 0);
        Self { tokenizer, bytes, special, longest }
    }

    /// The tokenizer.
    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Number of ids.
    pub(crate) fn size(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes of a token; empty where there is none.
    pub(crate) fn bytes(&self, token: u32) -> &[u8] {
        self.bytes.get(token as usize).map_or(&[], Vec::as_slice)
    }

    /// Whether a token is special.
    pub(crate) fn is_special(&self, token: u32) -> bool {
        self.special.get(token as usize).copied().unwrap_or(false)
    }

    /// A number of tokens that the text has at least; 0 if nothing is known.
    pub(crate) fn fewest_tokens(&self, text: &str) -> usize {
        let Some(longest) = self.longest else { return 0 };
        // White space may be removed, or belong to the special token beside it.
        let bytes: usize = text.split_whitespace().map(str::len).sum();
        bytes / (SHORTENED * longest)
    }

    /// The special token with this text.
    pub(crate) fn special_token(&self, text: &str) -> Option<u32> {
        self.tokenizer.token_to_id(text).filter(|token| self.is_special(*token))
    }

    /// The text of a token by itself; bytes that are no character become U+FFFD.
    pub(crate) fn text(&self, token: u32) -> String {
        String::from_utf8_lossy(self.bytes(token)).into_owned()
    }

    /// A decoder of texts.
    pub(crate) fn decoder(&self, skip_special: bool) -> Decoder<'_> {
        Decoder { tokenizer: &self.tokenizer, skip_special }
    }
}

/// Decodes texts with or without their special tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Decoder<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
}

impl Detokenize for Decoder<'_> {
    fn text(&self, tokens: &[u32]) -> ringspan_serve::Result<String> {
        self.tokenizer.decode(tokens, self.skip_special).map_err(|error| Error::Tokenizer(error.to_string()))
    }
}

/// Whether a normalizer keeps all characters but white space, or replaces them by their Unicode normal forms.
fn keeps_characters(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::NFC(_)
        | NormalizerWrapper::NFD(_)
        | NormalizerWrapper::NFKC(_)
        | NormalizerWrapper::NFKD(_)
        | NormalizerWrapper::Prepend(_) => true,
        // This is how SentencePiece's tokenizers write white space.
        NormalizerWrapper::Replace(replace) => replace.content == SPACE.to_string(),
        NormalizerWrapper::Sequence(all) => all.as_ref().iter().all(keeps_characters),
        _ => false,
    }
}

fn is_byte_level(tokenizer: &Tokenizer) -> bool {
    fn contains(decoder: &DecoderWrapper) -> bool {
        match decoder {
            DecoderWrapper::ByteLevel(_) => true,
            DecoderWrapper::Sequence(all) => all.get_decoders().iter().any(contains),
            _ => false,
        }
    }
    tokenizer.get_decoder().is_some_and(contains)
}

/// The characters by which byte-level tokenizers write bytes: printable Latin-1 as it is, the rest from U+0100 on.
fn byte_alphabet() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100;
    (0..=u8::MAX)
        .map(|byte| match printable(byte) {
            true => (char::from(byte), byte),
            false => {
                next += 1;
                (char::from_u32(next - 1).unwrap_or_default(), byte)
            }
        })
        .collect()
}

fn byte_level_bytes(token: &str, alphabet: &HashMap<char, u8>) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = token.chars().map(|c| alphabet.get(&c).copied()).collect();
    bytes.unwrap_or_else(|| token.as_bytes().to_vec())
}

fn sentence_piece_bytes(token: &str) -> Vec<u8> {
    let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match byte.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace(SPACE, " ").into_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_by_256_different_characters() {
        let alphabet = byte_alphabet();
        assert_eq!(alphabet.len(), 256);
        assert_eq!(byte_level_bytes("\u{120}a\u{10a}", &alphabet), b" a\n");
    }

    #[test]
    fn pieces_are_bytes_or_text_with_spaces() {
        assert_eq!(sentence_piece_bytes("<0x0A>"), b"\n");
        assert_eq!(sentence_piece_bytes("\u{2581}a<0x"), b" a<0x");
    }

    #[test]
    fn texts_have_at_least_the_tokens_that_their_bytes_need() {
        let vocabulary = |normalizer: serde_json::Value| {
            let alphabet: serde_json::Map<_, _> =
                byte_alphabet().into_iter().map(|(c, byte)| (c.to_string(), byte.into())).collect();
            let json = serde_json::json!({"version": "1.0", "normalizer": normalizer, "decoder": {"type": "ByteLevel",
                "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
                "model": {"type": "BPE", "vocab": alphabet, "merges": []}});
            Vocabulary::new(Tokenizer::from_bytes(json.to_string()).unwrap(), 256)
        };
        let replace =
            |content: &str| serde_json::json!({"type": "Replace", "pattern": {"String": " "}, "content": content});
        for normalizer in [serde_json::Value::Null, serde_json::json!({"type": "NFKC"}), replace("\u{2581}")] {
            assert_eq!(vocabulary(normalizer).fewest_tokens(&"ab  ".repeat(100)), 50);
        }
        for normalizer in [serde_json::json!({"type": "StripAccents"}), replace("")] {
            assert_eq!(vocabulary(normalizer).fewest_tokens(&"ab  ".repeat(100)), 0, "characters may be dropped");
        }
    }
}
