//! The output of a choice in chunks: its tokens are decoded to text that no later token can change.

use crate::error::{ApiError, Result};
use crate::sampling::Sampling;
use crate::vocabulary::Vocabulary;
use ringspan_serve::engine::request::TokenLogprobs;
use ringspan_serve::{Detokenize, TextStream};
use std::collections::VecDeque;

/// A chunk of a choice's output. They come in this order: the prompt, texts, the finish or a failure.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum OutputChunk {
    /// Log-probabilities of the prompt's tokens; the first has none.
    Prompt(Vec<Option<TokenLogprobs>>),
    /// Text that is certain, and the tokens that it came from.
    Text {
        /// Whole characters; may be empty.
        text: String,
        /// The tokens, with log-probabilities if they were asked for.
        tokens: Vec<(u32, Option<TokenLogprobs>)>,
        /// The number of tokens generated so far, also of those whose text is held back.
        generated: usize,
    },
    /// The text has ended.
    Finish(Finish),
    /// The engine has failed, or the server ends.
    Failed(ApiError),
}

/// How a text ended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Finish {
    /// Whether it ended because it was as long as allowed.
    pub(crate) length: bool,
    /// The stop string that ended it.
    pub(crate) stop_string: Option<String>,
    /// The stop token that ended it, if it is not the model's own end token.
    pub(crate) stop_token: Option<u32>,
    /// Number of generated tokens, with the one that ended the text.
    pub(crate) tokens: usize,
    /// Number of the prompt's tokens whose keys and values were cached.
    pub(crate) cached_tokens: usize,
}

fn undecodable(error: ringspan_serve::Error) -> ApiError {
    ApiError::failed(error.to_string())
}

/// Text that is certain, with the tokens whose text has been released.
pub(crate) struct DetokenizedOutput<'a> {
    stream: TextStream<'a>,
    vocabulary: &'a Vocabulary,
    skip_special: bool,
    /// Whether the client asked for tokens.
    reports_tokens: bool,
    /// Tokens whose text is held back, with the byte of the text at which each begins.
    held: VecDeque<(usize, (u32, Option<TokenLogprobs>))>,
    /// Bytes of all tokens so far.
    bytes: usize,
    /// Bytes of the text that was released.
    released: usize,
    /// Tokens so far, also of those whose text is held back.
    pub(crate) tokens: usize,
}

impl<'a> DetokenizedOutput<'a> {
    pub(crate) fn new(
        prompt: &[u32],
        sampling: &Sampling,
        vocabulary: &'a Vocabulary,
        decoder: &'a dyn Detokenize,
    ) -> Result<Self> {
        let stream = TextStream::new(decoder, prompt, &sampling.stop).map_err(undecodable)?;
        Ok(Self {
            stream,
            vocabulary,
            skip_special: sampling.skip_special_tokens,
            reports_tokens: sampling.logprobs.is_some() || sampling.return_token_ids,
            held: VecDeque::new(),
            bytes: 0,
            released: 0,
            tokens: 0,
        })
    }

    pub(crate) fn stopped(&self) -> bool {
        self.stream.stopped()
    }

    pub(crate) fn stop_string(&self) -> Option<String> {
        self.stream.stop_string().map(str::to_owned)
    }

    /// Adds a token; returns what became certain by it, if anything did.
    pub(crate) fn push(&mut self, token: u32, logprob: Option<TokenLogprobs>) -> Result<Option<OutputChunk>> {
        self.tokens += 1;
        if self.reports_tokens {
            self.held.push_back((self.bytes, (token, logprob)));
        }
        if !(self.skip_special && self.vocabulary.is_special(token)) {
            self.bytes += self.vocabulary.bytes(token).len();
        }
        let text = self.stream.push(token).map_err(undecodable)?;
        self.released += text.len();
        let tokens = self.release();
        Ok((!text.is_empty() || !tokens.is_empty()).then_some(OutputChunk::Text {
            text,
            tokens,
            generated: self.tokens,
        }))
    }

    /// Ends the text; returns what was held back.
    pub(crate) fn finish(&mut self) -> Result<OutputChunk> {
        let text = self.stream.finish().map_err(undecodable)?;
        self.released += text.len();
        let tokens = match self.stopped() {
            true => self.release(),
            false => self.held.drain(..).map(|(_, token)| token).collect(),
        };
        Ok(OutputChunk::Text { text, tokens, generated: self.tokens })
    }

    /// The tokens that begin in the released text. Those of a stop string begin after it.
    fn release(&mut self) -> Vec<(u32, Option<TokenLogprobs>)> {
        let begun = self.held.iter().take_while(|(start, _)| *start < self.released).count();
        self.held.drain(..begun).map(|(_, token)| token).collect()
    }
}
