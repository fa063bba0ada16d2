//! Tests of the engine's parts.

mod harness;
mod prefix;
mod sampling;
mod scheduling;
mod windows;

use super::request::{Request, SamplingParams};

/// A greedy request.
fn request(prompt: &[u32], max_tokens: usize) -> Request {
    Request { sampling: SamplingParams::greedy(), ..Request::new(prompt.to_vec(), max_tokens) }
}
