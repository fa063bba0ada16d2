//! Requests to the engine, and the events that it answers with.

use super::histogram::EngineHistograms;
use crate::paged::KvDtype;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::mpsc::UnboundedReceiver;

/// One sequence to generate, or to score or embed without generating (`max_tokens` 0).
#[derive(Debug)]
pub struct Request {
    /// Token ids of the prompt; at least one.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Upper limit of generated tokens.
    pub max_tokens: usize,
    /// Stop tokens cannot be drawn before there are this many tokens.
    pub min_tokens: usize,
    /// Tokens that end the text, such as the model's end tokens; the one that is drawn is reported, in [`FinishReason::Stop`].
    pub stop_token_ids: Vec<u32>,
    /// Report the log-probability of each generated token, and those of this many most likely tokens.
    pub logprobs: Option<usize>,
    /// Report the log-probability of each token of the prompt, and those of this many most likely tokens at its
    /// position.
    pub prompt_logprobs: Option<usize>,
    /// Name of the LoRA adapter to compute with; `None` for the base model.
    pub adapter: Option<String>,
    /// Keeps the request's pages in the prefix cache apart: only requests with the same salt find them.
    pub cache_salt: Option<Arc<str>>,
    /// Which tokens may come next: a grammar.
    pub constraint: Option<Box<dyn TokenConstraint>>,
    /// Report a vector for the whole prompt.
    pub embedding: Option<Pooling>,
}

impl Request {
    /// A request to the base model for up to `max_tokens` tokens, drawn from the whole distribution. Nothing but the tokens is
    /// reported.
    #[must_use]
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            prompt,
            sampling: SamplingParams::default(),
            max_tokens,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
            adapter: None,
            cache_salt: None,
            constraint: None,
            embedding: None,
        }
    }
}

/// How tokens are drawn. Penalties apply first, then the bias, the temperature, top-k, top-p and min-p.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 always takes the most likely token.
    pub temperature: f32,
    /// Keeps the K most likely tokens.
    pub top_k: Option<usize>,
    /// Keeps the most likely tokens that together have at least this probability.
    pub top_p: Option<f32>,
    /// Keeps tokens that are at least this share as likely as the most likely one.
    pub min_p: Option<f32>,
    /// Divides positive logits, and multiplies negative ones, of tokens in the prompt or the text (Hugging Face); 1 for none.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the generated text (OpenAI); 0 for none.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time it is in the generated text (OpenAI); 0 for none.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Seed of the random stream; `None` draws one.
    pub seed: Option<u64>,
}

impl SamplingParams {
    /// Always takes the most likely token.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: None,
            top_p: None,
            min_p: None,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            seed: None,
        }
    }
}

/// Restricts the next token of a text, as a grammar does.
pub trait TokenConstraint: Send + std::fmt::Debug {
    /// Sets the logits `[V]` of tokens that may not come next to -inf.
    ///
    /// # Errors
    /// A sentence about what is wrong with the grammar or the text.
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String>;

    /// Advances by the token that was drawn; returns whether the text must end here.
    ///
    /// # Errors
    /// As for [`TokenConstraint::mask`].
    fn advance(&mut self, token: u32) -> Result<bool, String>;
}

/// How the last hidden states of a prompt become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The last token's.
    Last,
}

/// The log-probability of a token, and the most likely tokens at its position, in descending order.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability, before penalties, bias and temperature.
    pub logprob: f32,
    /// The most likely tokens with their log-probabilities.
    pub top: Vec<(u32, f32)>,
}

/// An event of a request; its variants are in the order in which they come.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The first event of a request: its prefill begins.
    Started {
        /// Number of the prompt's tokens whose keys and values were in the cache already.
        cached_tokens: usize,
    },
    /// Log-probabilities of the prompt's tokens; the first has none.
    Prompt(Vec<Option<TokenLogprobs>>),
    /// The vector of the prompt, not normalized.
    Embedding(Vec<f32>),
    /// A generated token, and its log-probability if it was asked for.
    Token(u32, Option<TokenLogprobs>),
    /// The last event of a request that succeeded.
    Finished {
        /// Why the text ended.
        reason: FinishReason,
    },
    /// The last event of a request that failed: a sentence that says why.
    Failed(String),
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// One of the stop tokens was drawn (it is not reported as a token), or the grammar ended.
    Stop {
        /// The stop token.
        token: Option<u32>,
    },
    /// The text has `max_tokens` tokens, or the model's longest sequence is full.
    Length,
}

/// The events of a request. Dropping it ends the request and frees its pages of the cache.
pub type Events = UnboundedReceiver<Event>;

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// The request can never be served: too long, unknown tokens, an unknown adapter, options out of range.
    #[error("{0}")]
    Invalid(String),
    /// As many requests as the engine allows are waiting.
    #[error("{waiting} requests are waiting already, which is the limit; try again later")]
    Busy {
        /// Number of requests that wait.
        waiting: usize,
    },
    /// The engine ends, or a rank has failed: a sentence that says which.
    #[error("{0}")]
    Stopped(String),
}

/// A client of the engine, cheap to clone; the HTTP server has one.
pub trait EngineClient: Send + Sync {
    /// Queues a request.
    ///
    /// # Errors
    /// See [`Refusal`].
    fn submit(&self, request: Request) -> Result<Events, Refusal>;

    /// Runs one token through every rank, and returns once all have answered.
    ///
    /// # Errors
    /// The rank that failed, or a rank that does not answer in time.
    fn check_health(&self) -> Result<(), Refusal>;

    /// The engine's counters and gauges now.
    fn metrics(&self) -> Metrics;

    /// Sizes that never change while the engine runs.
    fn limits(&self) -> Limits;

    /// Loads a LoRA adapter (a PEFT folder) under a name, on every rank.
    ///
    /// # Errors
    /// An unreadable or unfitting adapter, a name that is taken.
    fn load_adapter(&self, name: &str, folder: &std::path::Path) -> Result<(), Refusal>;

    /// Forgets an adapter; requests that compute with it are finished first.
    ///
    /// # Errors
    /// An unknown name.
    fn unload_adapter(&self, name: &str) -> Result<(), Refusal>;

    /// Names of the loaded adapters, sorted.
    fn adapters(&self) -> Vec<String>;
}

/// Sizes of the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Largest number of tokens of a sequence, prompt and text.
    pub max_model_len: usize,
    /// Number of tokens V of the vocabulary.
    pub vocabulary: usize,
    /// Width of a hidden state, and so of an embedding.
    pub hidden_size: usize,
    /// Largest number of requests of an attention replica in one step.
    pub max_running: usize,
    /// Largest number of requests that wait.
    pub max_waiting: usize,
    /// Number of ranks of the mesh.
    pub ranks: usize,
    /// Number of attention replicas (attention data parallel), each of which has the pages of its own sequences.
    pub attn_dp: usize,
    /// Number of ranks over which the pages of a sequence are distributed (context parallel).
    pub cp: usize,
    /// Number of pipeline stages, each of which has the pages of its layers.
    pub pp: usize,
    /// Tokens of a page of the cache.
    pub page_size: usize,
    /// Pages that each rank has.
    pub pages_per_rank: usize,
    /// Pages of each rank for sliding-window layers; 0 if the model has none. [`pages_per_rank`](Self::pages_per_rank)
    /// counts the pages for full-attention layers; in a model without such layers they take no memory, and only record
    /// which tokens are in the cache.
    pub window_pages_per_rank: usize,
    /// The largest number of tokens before its own that a token attends to in sliding-window layers; `None` if the
    /// model has none.
    pub window_lookback: Option<usize>,
    /// Whether the model has full-attention layers.
    pub has_full_layers: bool,
    /// Bytes of the keys and values in the pages of a rank.
    pub cache_bytes: u64,
    /// Type of the cache's keys and values; `None` for that in which the model computes.
    pub kv_dtype: Option<KvDtype>,
    /// Whether texts with the same beginning share their pages.
    pub prefix_cache: bool,
}

impl Limits {
    /// Number of tokens that the pages of all ranks hold.
    pub fn cache_tokens(&self) -> usize {
        self.pages_per_rank.saturating_mul(self.attn_dp).saturating_mul(self.cp).saturating_mul(self.page_size)
    }

    /// The attention replica of a rank.
    pub fn replica_of(&self, rank: usize) -> usize {
        let stage = (self.ranks / self.pp.max(1)).max(1);
        rank % stage * self.attn_dp / stage
    }

    /// Share of the pages that running requests hold, in the attention replica and for the kind of layers of which fewest are left.
    pub fn usage(&self, ranks: &[RankMetrics]) -> f64 {
        let share = |used: usize, each: usize, of: usize| used as f64 / each.saturating_mul(of).max(1) as f64;
        let of_replica = |replica: usize| {
            let own = || ranks.iter().enumerate().filter(move |(rank, _)| self.replica_of(*rank) == replica);
            let full = own().map(|(_, rank)| rank.pages_used).sum();
            let window = own().map(|(_, rank)| rank.window_pages_used).sum();
            let of = own().count();
            share(full, self.pages_per_rank, of).max(share(window, self.window_pages_per_rank, of))
        };
        (0..self.attn_dp).map(of_replica).fold(0.0, f64::max)
    }
}

/// Counters (since the start) and gauges (now) of the engine.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metrics {
    /// Requests that are in the current steps.
    pub running: usize,
    /// Requests that wait for pages, or because `max_running` others run.
    pub waiting: usize,
    /// Prompt tokens that were computed or found in the cache.
    pub prompt_tokens: u64,
    /// Generated tokens.
    pub generation_tokens: u64,
    /// Prompt tokens that were looked up in the prefix cache.
    pub prefix_cache_queries: u64,
    /// Prompt tokens that were found there.
    pub prefix_cache_hits: u64,
    /// Requests that were preempted because pages ran out; they are computed again later.
    pub preemptions: u64,
    /// Number of times that draft tokens were proposed for a sequence.
    pub spec_decode_drafts: u64,
    /// Draft tokens that were proposed.
    pub spec_decode_draft_tokens: u64,
    /// Draft tokens that were accepted.
    pub spec_decode_accepted_tokens: u64,
    /// Steps of the engine.
    pub steps: u64,
    /// Names of the adapters of requests that run.
    pub running_adapters: BTreeSet<String>,
    /// Names of the adapters of requests that wait.
    pub waiting_adapters: BTreeSet<String>,
    /// How long requests waited and ran, and how many tokens steps had.
    pub histograms: EngineHistograms,
    /// The metrics of each rank.
    pub ranks: Vec<RankMetrics>,
}

/// Counters and gauges of a rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RankMetrics {
    /// Pages that running requests hold.
    pub pages_used: usize,
    /// Pages that only the prefix cache holds.
    pub pages_cached: usize,
    /// Pages of sliding-window layers that running requests hold.
    pub window_pages_used: usize,
    /// Pages of sliding-window layers that only the prefix cache holds.
    pub window_pages_cached: usize,
    /// Bytes that the rank has sent to others.
    pub transfer_bytes: u64,
    /// Time that the rank has waited for others.
    pub wait_seconds: f64,
}
