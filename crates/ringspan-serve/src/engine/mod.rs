//! The inference engine: many requests at a time over one mesh of ranks.
//!
//! An [`Engine`] keeps its ranks, with their threads, communicators and caches, until it is shut down. Rank 0 schedules: it decides
//! which tokens of which requests are computed next and in which pages of the cache, and broadcasts that as data (a
//! [`Step`](step::Step)), which all ranks execute. Clients submit a [`Request`](request::Request) and receive
//! [`Event`](request::Event)s.
//!
//! The cache is paged: page i of a sequence is on context-parallel rank i mod P, for prompts and generated text alike. Pages of
//! finished sequences stay in the prefix cache until other sequences need them, so a prompt with the same prefix is not computed
//! again.

mod adapter_sets;
mod client;
mod engine_core;
mod engine_handle;
mod executor;
mod fingerprint;
mod histogram;
mod limits;
mod logprobs;
mod model_executor;
mod model_shards;
mod options;
mod outbox;
mod page_plan;
mod page_pool;
mod prefill_budget;
mod prefix_cache;
mod prefix_tree;
mod prompt_lookup;
mod rank;
mod rank_command;
pub mod request;
mod request_times;
mod row_parts;
mod scheduler;
mod sequence;
mod session;
mod session_file;
mod shared;
mod step_logits;
mod token_sampler;
mod window_page_pool;

#[cfg(test)]
mod test;

pub use crate::step;
pub use client::Client;
pub use engine_handle::Engine;
pub use executor::{Executor, KvRowLayout};
pub use fingerprint::fingerprint;
pub use histogram::{EngineHistograms, Histogram};
pub use options::{EngineOptions, EngineSizes, KvCacheSize, WindowSizes};
pub use row_parts::RowPart;
pub use session::SessionSize;
