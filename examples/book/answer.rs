//! The answers of an engine, and how long they took.

use anyhow::{Context, Result, bail};
use ringspan_serve::engine::Engine;
use ringspan_serve::engine::request::{EngineClient, Event, Request, SamplingParams};
use std::fmt::{self, Display, Formatter};
use std::time::{Duration, Instant};

/// Prompts to be answered one after the other.
pub(crate) struct PreparedPrompts<'a> {
    pub(crate) prompts: &'a [Vec<u32>],
    /// Tokens of an answer at most.
    pub(crate) max_tokens: usize,
    /// The tokens that end an answer.
    pub(crate) end_tokens: Vec<u32>,
}

/// An answer.
pub(crate) struct Answer {
    pub(crate) tokens: Vec<u32>,
    /// Tokens of the prompt, and how many of them were in the cache.
    prompt: (usize, usize),
    /// Time until the first token.
    first: Duration,
    /// Time from the first token to the last.
    rest: Duration,
    /// Pages of the cache that hold keys and values, by rank.
    pages: Vec<usize>,
}

impl PreparedPrompts<'_> {
    /// Asks for the most likely tokens.
    ///
    /// # Errors
    /// A refusal or a failure of the engine.
    pub(crate) fn ask(&self, engine: &Engine) -> Result<Vec<Answer>> {
        self.prompts.iter().map(|prompt| self.answer(engine, prompt)).collect()
    }

    fn answer(&self, engine: &Engine, prompt: &[u32]) -> Result<Answer> {
        let client = engine.client();
        let began = Instant::now();
        let mut events = client.submit(Request {
            sampling: SamplingParams::greedy(),
            stop_token_ids: self.end_tokens.clone(),
            ..Request::new(prompt.to_vec(), self.max_tokens)
        })?;
        let (mut tokens, mut cached, mut first) = (Vec::new(), 0, None);
        loop {
            match events.blocking_recv().context("the engine ended without an answer")? {
                Event::Started { cached_tokens } => cached = cached_tokens,
                Event::Token(token, _) => {
                    first.get_or_insert_with(|| began.elapsed());
                    tokens.push(token);
                }
                Event::Finished { .. } => {
                    let first = first.unwrap_or_else(|| began.elapsed());
                    let pages = client.metrics().ranks.iter().map(|rank| rank.pages_used + rank.pages_cached).collect();
                    let rest = began.elapsed().saturating_sub(first);
                    return Ok(Answer { tokens, prompt: (prompt.len(), cached), first, rest, pages });
                }
                Event::Failed(problem) => bail!(problem),
                Event::Prompt(_) | Event::Embedding(_) => {}
            }
        }
    }
}

impl Display for Answer {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let ((prompt, cached), first) = (self.prompt, self.first.as_secs_f64());
        let read = prompt - cached;
        write!(
            f,
            "{read} tokens read in {first:.2} s ({:.0} tokens/s), {cached} found in the cache; ",
            read as f64 / first
        )?;
        let (more, rest) = (self.tokens.len().saturating_sub(1), self.rest.as_secs_f64());
        write!(f, "{more} more tokens in {rest:.2} s; pages by rank {:?}", self.pages)
    }
}
