//! Attention as a layer, with its mask and its scores.

use super::ForwardPass;
use crate::attend::AttentionInputs;
use crate::lora::dropout_stream;
use crate::parameters::{Init, Scope};
use crate::shard::{HeadCounts, ShardSpec, Split};
use crate::tape;
use candle_core::{Result, Tensor};
use ringspan::{Mask, Score};

/// Attention of one layer, over the tokens of all ranks.
#[derive(Debug, Clone)]
pub struct Attention {
    index: usize,
    heads: HeadCounts,
    mask: Mask,
    score: Score,
    /// Share of the attention weights that is dropped in training.
    dropout: f64,
    /// Number of the layer, by which its dropout differs from that of other layers.
    stream: u64,
    sinks: Option<String>,
    /// Widths D and Dv, where they differ from those in the model's configuration.
    head_dims: Option<[usize; 2]>,
}

impl Attention {
    /// The attention of layer `index`; its parameters and its name are in `scope`.
    #[must_use]
    pub fn new(scope: &Scope, index: usize, heads: HeadCounts, mask: Mask, score: Score) -> Self {
        let stream = dropout_stream(scope.name());
        Self { index, heads, mask, score, dropout: 0.0, stream, sinks: None, head_dims: None }
    }

    /// Drops this share of the attention weights in training.
    #[must_use]
    pub fn with_dropout(self, dropout: f64) -> Self {
        Self { dropout, ..self }
    }

    /// Adds a sink for each query head, the parameter `sinks` `[H]` in `scope`: the score of one more key, with value 0, that
    /// every query sees (Xiao et al., 2023, arXiv:2309.17453).
    #[must_use]
    pub fn with_sinks(self, scope: &Scope) -> Self {
        let shard = ShardSpec::Rows(Split::QueryHeads(self.heads, 1));
        Self { sinks: Some(scope.parameter("sinks", &[self.heads.queries], shard, Init::Normal)), ..self }
    }

    /// Sets the widths of heads: D of queries and keys, Dv of values.
    #[must_use]
    pub fn with_head_dims(self, query_key: usize, value: usize) -> Self {
        Self { head_dims: Some([query_key, value]), ..self }
    }

    /// The widths D of queries and keys and Dv of values; `None` if they are those in the model's configuration.
    #[must_use]
    pub fn head_dims(&self) -> Option<[usize; 2]> {
        self.head_dims
    }

    /// Whether the attention has sinks.
    #[must_use]
    pub fn has_sinks(&self) -> bool {
        self.sinks.is_some()
    }

    /// The numbers of heads.
    #[must_use]
    pub fn heads(&self) -> HeadCounts {
        self.heads
    }

    /// The mask, which says which tokens a token sees.
    #[must_use]
    pub fn mask(&self) -> &Mask {
        &self.mask
    }

    /// q `[T, H, D]`, k `[T, G, D]` and v `[T, G, Dv]` to `[T, H * Dv]`, for this rank's heads.
    ///
    /// # Errors
    /// Shapes that do not fit, and failures of other ranks.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let attend = pass.attend();
        let sinks = self.sinks.as_ref().map(|sinks| pass.tensor(sinks)).transpose()?;
        let inputs = AttentionInputs { sinks, ..AttentionInputs::new(q, k, v) };
        let out = attend.layer_attention(self.index, &inputs, &self.mask, &self.score(pass)?)?;
        let (tokens, heads, dim) = out.dims3()?;
        tape::reshape(&out, (tokens, heads * dim))
    }

    /// The score with its dropout in training. Dropout depends on the numbers of heads and tokens in the whole step, so that
    /// every mesh drops the same weights.
    fn score(&self, pass: &ForwardPass) -> Result<Score> {
        let score = self.score.clone();
        let Some(dropout) = pass.attend().input_dropout().filter(|_| self.dropout > 0.0) else { return Ok(score) };
        let heads =
            self.heads.of_rank(pass.attend().tensor_parallel().rank_and_size()).map_err(candle_core::Error::wrap)?;
        let dropout = dropout.of_attention(self.dropout, self.stream, heads.queries.start);
        Ok(Score { dropout: Some(dropout), ..score })
    }
}
