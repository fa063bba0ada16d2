//! Options of an engine, and the properties of model, mesh and machine on which its sizes depend.

use crate::paged::KvDtype;
use std::time::Duration;

/// Settings of an engine.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineOptions {
    /// Tokens of a page of the cache: more of them make longer runs of keys on a rank, fewer distribute short texts more evenly over
    /// the ranks.
    pub page_size: usize,
    /// Memory of the cache.
    pub kv_cache: KvCacheSize,
    /// Type of the cache's keys and values; `None` for that in which the model computes.
    pub kv_dtype: Option<KvDtype>,
    /// Largest number of tokens of a sequence, prompt and text; `None` for as many as the model is made for and the cache holds.
    pub max_model_len: Option<usize>,
    /// Largest number of requests of an attention replica in one step.
    pub max_running: usize,
    /// Largest number of requests that wait.
    pub max_waiting: usize,
    /// Largest number of prompt tokens of an attention replica in one step.
    pub prefill_chunk: usize,
    /// Largest number of prompt tokens in a step in which other requests decode: a larger number prefills prompts
    /// faster, a smaller one shortens the time between the tokens of decoding requests. With `None`, the engine
    /// measures its steps, and chooses the number so that 99% of the steps that also prefill should take up to 2.8 times as
    /// long as one that only decodes, and the time between tokens stays within three times its median.
    pub mixed_chunk: Option<usize>,
    /// Keeps the keys and values of texts as long as there is room, so that texts with the same beginning need not compute it
    /// again.
    pub prefix_cache: bool,
    /// Largest number of draft tokens of a sequence in one step of speculative decoding, found by prompt lookup: the
    /// sequence's last tokens are looked up in its own text. 0 for none. Texts do not depend on it.
    pub num_speculative_tokens: usize,
    /// Longest wait of a client for the answer to a health check or the loading of an adapter.
    pub deadline: Duration,
}

/// Memory for keys and values on each rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KvCacheSize {
    /// Bytes on each rank.
    Bytes(u64),
    /// Share of the machine's free memory, for all ranks of this machine together; from 0 to 1.
    Share(f64),
    /// Pages on each rank for full-attention layers, and as many for sliding-window layers.
    Pages(usize),
    /// What one sequence of `max_model_len` tokens needs, and at most this share of the machine's free memory, for all ranks of this
    /// machine together: where that is less, the sequence may have fewer tokens.
    OneSequence(f64),
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            page_size: 64,
            kv_cache: KvCacheSize::Share(0.5),
            kv_dtype: None,
            max_model_len: None,
            max_running: 64,
            max_waiting: 1024,
            prefill_chunk: 512,
            mixed_chunk: None,
            prefix_cache: true,
            num_speculative_tokens: 0,
            deadline: Duration::from_secs(60),
        }
    }
}

/// The properties of model, mesh and machine that the sizes of an engine depend on.
#[derive(Debug, Clone, Copy)]
pub struct EngineSizes {
    /// Number of tokens V of the vocabulary.
    pub vocabulary: usize,
    /// Width of a hidden state.
    pub hidden_size: usize,
    /// Number of ranks of the mesh.
    pub ranks: usize,
    /// Number of attention replicas (attention data parallel), each of which has the pages of its own sequences.
    pub attn_dp: usize,
    /// Number of ranks over which the pages of a sequence are distributed (context parallel). The ranks that share the width of
    /// layers each have their heads' part of the same pages.
    pub cp: usize,
    /// Number of pipeline stages, each of which has the pages of its layers.
    pub pp: usize,
    /// Number of ranks on this machine.
    pub local_ranks: usize,
    /// Bytes of a page on one rank, over all full-attention layers.
    pub page_bytes: u64,
    /// The sliding-window layers, if the model has any.
    pub window: Option<WindowSizes>,
    /// Length of the texts that the model is made for.
    pub trained_length: Option<usize>,
}

/// The sliding-window layers of a model.
#[derive(Debug, Clone, Copy)]
pub struct WindowSizes {
    /// The largest number of tokens before its own that a token attends to.
    pub lookback: usize,
    /// Bytes of a page on one rank, in all of these layers.
    pub page_bytes: u64,
}
