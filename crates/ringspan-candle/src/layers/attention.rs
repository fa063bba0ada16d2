//! Attention as a layer: which tokens a token sees, and how products become weights.

use super::ForwardPass;
use crate::lora::stream;
use crate::model::Scope;
use crate::shard::HeadCounts;
use candle_core::{Result, Tensor};
use ringspan::{Mask, Score};

/// Attention of one layer, over the tokens of all ranks.
#[derive(Debug, Clone)]
pub struct Attention {
    index: usize,
    heads: HeadCounts,
    mask: Mask,
    score: Score,
    /// Share of the weights that is dropped in training.
    dropout: f64,
    /// Number of the layer, by which it drops apart from others.
    stream: u64,
}

impl Attention {
    /// Attention of the layer `index`, whose parameters stand at `scope`.
    #[must_use]
    pub fn new(scope: &Scope, index: usize, heads: HeadCounts, mask: Mask, score: Score) -> Self {
        Self { index, heads, mask, score, dropout: 0.0, stream: stream(scope.name()) }
    }

    /// The same, with a share of its weights dropped in training.
    #[must_use]
    pub fn with_dropout(self, dropout: f64) -> Self {
        Self { dropout, ..self }
    }

    /// Its heads.
    #[must_use]
    pub fn heads(&self) -> HeadCounts {
        self.heads
    }

    /// Which tokens a token sees.
    #[must_use]
    pub fn mask(&self) -> &Mask {
        &self.mask
    }

    /// q `[T, H, D]`, k `[T, G, D]` and v `[T, G, Dv]` to `[T, H * Dv]`: this rank's heads.
    ///
    /// # Errors
    /// Shapes that do not fit, and failures of other ranks.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let attend = pass.attend();
        attend.attention(self.index, q, k, v, &self.mask, &self.score(pass)?)?.flatten_from(1)
    }

    /// From products to weights. Some weights may be dropped in training: by the heads and tokens of the whole step, so that
    /// every mesh drops the same.
    fn score(&self, pass: &ForwardPass) -> Result<Score> {
        let score = self.score.clone();
        let Some(drops) = pass.attend().drops().filter(|_| self.dropout > 0.0) else { return Ok(score) };
        let heads = self.heads.of_rank(pass.attend().tensor_parallel().place()).map_err(candle_core::Error::wrap)?;
        let dropout = drops.of_attention(self.dropout, self.stream, heads.queries.start);
        Ok(Score { dropout: Some(dropout), ..score })
    }
}
