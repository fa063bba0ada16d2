//! Tests of the engine's parts.

mod prefix;
mod sampling;
mod scheduling;

use super::request::{Request, SamplingParams};

/// A greedy request.
fn request(prompt: &[u32], max_tokens: usize) -> Request {
    Request {
        prompt: prompt.to_vec(),
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        max_tokens,
        min_tokens: 0,
        stop_token_ids: Vec::new(),
        logprobs: None,
        prompt_logprobs: None,
        adapter: None,
        constraint: None,
        embedding: None,
    }
}
