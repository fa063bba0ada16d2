//! UMT5's encoder, which makes the embeddings of a prompt.
//!
//! A prompt of at most 512 tokens passes through each layer once, so a layer's weights are read when it is reached and
//! freed after it: the memory is that of one layer, not of the model's 5.7 billion parameters. Ranks share the tokens.
//!
//! Source: Chung et al., 2023 (arXiv:2304.09151), Raffel et al., 2020 (arXiv:1910.10683). Unlike in T5, each layer has relative
//! buckets of its own.

mod config;
mod encoder;
mod prompt;
mod sentence_piece;
mod weight_files;

pub use config::TextEncoderConfig;
pub use encoder::TextEncoder;
pub use prompt::{PromptTokenizer, PromptTokens};

/// Rows of a prompt's embeddings, of which WAN's transformer sees all.
pub const PROMPT_ROWS: usize = 512;
