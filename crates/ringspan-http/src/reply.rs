//! The answers of a conversation as they arrive: words, calls of tools, ends, and the tokens that they have cost.

use crate::error::Result;
use crate::generation::OutputStream;
use crate::output::{Finish, OutputChunk};
use crate::tools::{Parsed, ToolParser};
use ringspan_serve::engine::request::TokenLogprobs;
use serde_json::{Value, json};

/// The answers of a conversation, as they arrive.
#[derive(Debug)]
pub(crate) struct Reply {
    texts: OutputStream,
    parsers: Vec<ToolParser>,
    /// For each answer, whether it has called a tool.
    called: Vec<bool>,
    /// An end that is reported after what the parser held back.
    ended: Option<(usize, ReplyPart)>,
    /// The tokens of the prompt.
    pub(crate) prompt: Vec<u32>,
    /// The usage so far; complete once all answers have ended.
    pub(crate) usage: Usage,
    /// The number of tokens generated for each answer so far.
    pub(crate) generated: Vec<usize>,
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ReplyPart {
    /// Log-probabilities of the prompt.
    Prompt(Vec<Option<TokenLogprobs>>),
    /// Words and calls, with the tokens that have become certain.
    Delta(Vec<Parsed>, Vec<(u32, Option<TokenLogprobs>)>),
    /// The answer has ended; whether it has called tools.
    Finish(Finish, bool),
}

impl Reply {
    /// The answers to a prompt: their texts, and what finds the calls of tools in each.
    pub(crate) fn new(prompt: Vec<u32>, texts: OutputStream, parsers: Vec<ToolParser>) -> Self {
        let usage = Usage { prompt_tokens: prompt.len(), ..Usage::default() };
        Self {
            called: vec![false; parsers.len()],
            generated: vec![0; parsers.len()],
            texts,
            parsers,
            ended: None,
            prompt,
            usage,
        }
    }

    /// The next part, with the index of its answer; `None` once all have ended.
    ///
    /// # Errors
    /// A failure of the engine.
    pub(crate) async fn next(&mut self) -> Result<Option<(usize, ReplyPart)>> {
        if let Some(end) = self.ended.take() {
            return Ok(Some(end));
        }
        let Some((index, part)) = self.texts.next().await? else { return Ok(None) };
        let part = match part {
            OutputChunk::Prompt(logprobs) => ReplyPart::Prompt(logprobs),
            OutputChunk::Text { text, tokens, generated } => {
                self.generated[index] = generated;
                let parsed = self.parsers[index].push(&text);
                self.note(index, &parsed);
                ReplyPart::Delta(parsed, tokens)
            }
            OutputChunk::Finish(end) => {
                self.usage.add(&end);
                let rest = self.parsers[index].finish();
                self.note(index, &rest);
                let end = ReplyPart::Finish(end, self.called[index]);
                if rest.is_empty() {
                    end
                } else {
                    self.ended = Some((index, end));
                    ReplyPart::Delta(rest, Vec::new())
                }
            }
            OutputChunk::Failed(error) => return Err(error),
        };
        Ok(Some((index, part)))
    }

    fn note(&mut self, index: usize, parsed: &[Parsed]) {
        self.called[index] |= parsed.iter().any(|part| matches!(part, Parsed::Call(_)));
    }
}

/// Tokens that a request has cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Tokens of the prompts.
    pub(crate) prompt_tokens: usize,
    /// Generated tokens.
    pub(crate) completion_tokens: usize,
    /// Tokens of the prompts that were cached.
    pub(crate) cached_tokens: usize,
}

impl Usage {
    /// Adds a text that has ended. Texts of one prompt share it, so the largest cached part counts.
    pub(crate) fn add(&mut self, end: &Finish) {
        self.completion_tokens += end.tokens;
        self.cached_tokens = self.cached_tokens.max(end.cached_tokens);
    }

    /// In OpenAI's shape.
    pub(crate) fn to_json(self) -> Value {
        let mut usage = self.counts();
        usage["prompt_tokens_details"] = json!({"cached_tokens": self.cached_tokens});
        usage
    }

    /// The tokens alone, without what is known only at the end.
    fn counts(self) -> Value {
        json!({"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens})
    }
}

/// When a stream reports the usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamUsage {
    Never,
    /// In a last chunk of its own; `usage` is null in the others, as clients of OpenAI expect.
    AtEnd,
    /// Also in each chunk, of its choice so far (vLLM's `continuous_usage_stats`).
    InEachChunk,
}

impl StreamUsage {
    /// Adds the usage of a chunk's choice so far to the chunk.
    pub(crate) fn write(self, chunk: &mut Value, so_far: Usage) {
        match self {
            Self::Never => {}
            Self::AtEnd => chunk["usage"] = Value::Null,
            Self::InEachChunk => chunk["usage"] = so_far.counts(),
        }
    }
}
