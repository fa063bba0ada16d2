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
    /// Characters of the tokens so far.
    offset: usize,
    /// Bytes of an unfinished character.
    unfinished: Vec<u8>,
}

impl LegacyLogprobs {
    /// Adds a token; the first token of a prompt has no log-probability.
    pub(crate) fn push(&mut self, vocabulary: &Vocabulary, token: u32, logprobs: Option<&TokenLogprobs>) {
        self.tokens.push(vocabulary.text(token));
        self.text_offset.push(self.offset);
        if !vocabulary.is_special(token) {
            self.unfinished.extend_from_slice(vocabulary.bytes(token));
        }
        let whole = match std::str::from_utf8(&self.unfinished) {
            Ok(text) => text.chars().count(),
            // An unfinished character counts with the token that finishes it.
            Err(error) if error.error_len().is_none() => 0,
            Err(_) => String::from_utf8_lossy(&self.unfinished).chars().count(),
        };
        if whole > 0 {
            self.offset += whole;
            self.unfinished.clear();
        }
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
