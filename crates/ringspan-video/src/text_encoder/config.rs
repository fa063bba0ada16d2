//! The configuration of a T5 encoder, as transformers writes it to `config.json`.

use crate::error::{Error, Result};
use serde::Deserialize;

/// `UMT5EncoderModel`: names are those of transformers.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct TextEncoderConfig {
    /// Width of the hidden states.
    pub d_model: usize,
    /// Width of a head.
    pub d_kv: usize,
    /// Inner width of the feed-forward layers.
    pub d_ff: usize,
    /// Heads of attention.
    pub num_heads: usize,
    /// Layers.
    pub num_layers: usize,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Relative buckets of both directions.
    pub relative_attention_num_buckets: usize,
    /// Distance from which all keys are in the last bucket.
    pub relative_attention_max_distance: usize,
    /// Added to the mean of squares in norms.
    pub layer_norm_epsilon: f64,
    /// The kind of the feed-forward layers: only `gated-gelu` is supported.
    pub feed_forward_proj: String,
}

impl TextEncoderConfig {
    /// Checks that the numbers fit each other.
    ///
    /// # Errors
    /// The first number that does not.
    pub fn check(&self) -> Result<()> {
        let Self { d_model, d_kv, d_ff, num_heads, num_layers, vocab_size, .. } = *self;
        let buckets = self.relative_attention_num_buckets;
        let refuse = |problem: String| Err(Error::Config(problem));
        if [d_model, d_kv, d_ff, num_heads, num_layers, vocab_size].contains(&0) {
            return refuse(format!(
                "d_model {d_model}, d_kv {d_kv}, d_ff {d_ff}, num_heads {num_heads}, num_layers {num_layers}, vocab_size \
                 {vocab_size}: none may be 0"
            ));
        }
        if buckets < 4 || !buckets.is_multiple_of(4) || self.relative_attention_max_distance <= buckets / 4 {
            return refuse(format!(
                "relative_attention_num_buckets {buckets}, relative_attention_max_distance {}: a multiple of 4 is needed, and a \
                 distance above a quarter of it",
                self.relative_attention_max_distance
            ));
        }
        if self.feed_forward_proj != "gated-gelu" {
            return refuse(format!("feed_forward_proj {}: gated-gelu is supported", self.feed_forward_proj));
        }
        Ok(())
    }
}
