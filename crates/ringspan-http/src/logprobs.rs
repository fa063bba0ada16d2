//! Log-probabilities in the shapes of chat, of text completions, and of vLLM's prompts.

use crate::vocabulary::Vocabulary;
use ringspan_serve::engine::request::TokenLogprobs;
use serde_json::{Map, Value, json};

/// The smallest number that stands for a probability of 0 in JSON, which knows no infinity.
const SMALLEST: f32 = -9999.0;

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { SMALLEST }
}

/// `logprobs.content` of chat: for each token its text, bytes and alternatives.
pub(crate) fn chat(vocabulary: &Vocabulary, tokens: &[(u32, Option<TokenLogprobs>)]) -> Vec<Value> {
    let one = |token: u32, logprob: f32| json!({"token": vocabulary.text(token), "logprob": finite(logprob), "bytes": vocabulary.bytes(token)});
    let each = |logprobs: &TokenLogprobs| {
        let mut entry = one(logprobs.token, logprobs.logprob);
        entry["top_logprobs"] = logprobs.top.iter().map(|(token, logprob)| one(*token, *logprob)).collect();
        entry
    };
    tokens.iter().filter_map(|(_, logprobs)| logprobs.as_ref()).map(each).collect()
}

/// `logprobs` of a text completion, which grows token by token.
#[derive(Debug, Default)]
pub(crate) struct LegacyLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
    /// Characters of the text so far, without an unfinished one.
    offset: usize,
    /// Bytes of an unfinished character.
    unfinished: Vec<u8>,
}

impl LegacyLogprobs {
    /// Adds a token, and whether the text shows it; the first token of a prompt has no log-probability.
    pub(crate) fn push(
        &mut self,
        vocabulary: &Vocabulary,
        (token, shown): (u32, bool),
        logprobs: Option<&TokenLogprobs>,
    ) {
        self.tokens.push(vocabulary.text(token));
        let bytes = if shown { vocabulary.bytes(token) } else { &[] };
        let offset = self.advance(bytes);
        self.text_offset.push(offset);
        self.token_logprobs.push(logprobs.map(|logprobs| finite(logprobs.logprob)));
        self.top_logprobs.push(logprobs.map(|logprobs| {
            let own = (logprobs.token, logprobs.logprob);
            let mut top = Map::new();
            // Several tokens may have the same text; the likeliest comes first and stays.
            for (token, logprob) in logprobs.top.iter().chain([&own]) {
                top.entry(vocabulary.text(*token)).or_insert_with(|| json!(finite(*logprob)));
            }
            top
        }));
    }

    /// Adds bytes to the text; returns the number of characters before them. Bytes that are no character become U+FFFD.
    fn advance(&mut self, bytes: &[u8]) -> usize {
        let (before, mut start, mut end) = (self.unfinished.len(), self.offset, 0);
        let mut all = std::mem::take(&mut self.unfinished);
        all.extend_from_slice(bytes);
        for chunk in all.utf8_chunks() {
            let invalid = chunk.invalid();
            self.offset += chunk.valid().chars().count();
            end += chunk.valid().len();
            let is_last = end + invalid.len() == all.len();
            if is_last && std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none()) {
                // A later token may finish this character.
                self.unfinished = invalid.to_vec();
            } else if !invalid.is_empty() {
                self.offset += 1;
                end += invalid.len();
                if end <= before {
                    start = self.offset;
                }
            }
        }
        start
    }

    /// The entries that were added since the last call, in OpenAI's shape.
    pub(crate) fn take(&mut self) -> Value {
        json!({"tokens": std::mem::take(&mut self.tokens), "token_logprobs": std::mem::take(&mut self.token_logprobs),
            "top_logprobs": std::mem::take(&mut self.top_logprobs), "text_offset": std::mem::take(&mut self.text_offset)})
    }
}

/// `prompt_logprobs` in vLLM's shape: for each token of the prompt an object from token ids to log-probabilities.
pub(crate) fn prompt(vocabulary: &Vocabulary, logprobs: &[Option<TokenLogprobs>]) -> Value {
    let each = |logprobs: &TokenLogprobs| {
        let mut entry = Map::new();
        let own = (None, &(logprobs.token, logprobs.logprob));
        let top = logprobs.top.iter().enumerate().map(|(index, token)| (Some(index + 1), token));
        for (rank, (token, logprob)) in top.chain([own]) {
            let value = json!({"logprob": finite(*logprob), "rank": rank, "decoded_token": vocabulary.text(*token)});
            entry.entry(token.to_string()).or_insert(value);
        }
        Value::Object(entry)
    };
    logprobs.iter().map(|logprobs| logprobs.as_ref().map(each)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets are where the tokens' texts begin in the text, whatever is cut where.
    #[test]
    fn offsets_count_the_characters_of_the_text() {
        let cases: [(&[&[u8]], &[usize]); 6] = [
            (&[b"ab", b"c", b"", b"d"], &[0, 2, 3, 3]),
            // A character in two tokens begins with the first.
            (&[b"a\xc3", b"\xa9b", b"c"], &[0, 1, 3]),
            // Bytes that nothing finishes are U+FFFD, of which the next token is behind.
            (&[b"\xc3", b"\xc3", b",", b"3"], &[0, 1, 2, 3]),
            (&[b"\x80\x80", b"a"], &[0, 2]),
            (&[b"\xe2\x82", b"\xac", b"x"], &[0, 0, 1]),
            (&[b"\xe2\x82", b",", b"\xf0\x9f\x98", b"\x80", b"x"], &[0, 1, 2, 2, 3]),
        ];
        for (tokens, offsets) in cases {
            let mut logprobs = LegacyLogprobs::default();
            let found: Vec<usize> = tokens.iter().map(|token| logprobs.advance(token)).collect();
            assert_eq!(found, offsets, "{tokens:?}");
            let whole = String::from_utf8(tokens.concat());
            assert!(whole.is_err() || logprobs.offset == whole.unwrap().chars().count(), "{tokens:?}");
        }
    }
}
