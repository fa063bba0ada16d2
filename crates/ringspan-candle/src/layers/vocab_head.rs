//! The output head: from hidden states to logits of the vocabulary.

use super::forward_pass::parameter;
use super::{VocabEmbedding, scaled};
use crate::loss::{self, HeadLoss, OutputHead};
use crate::model::{Init, Scope, StoredWeights};
use crate::shard::{ShardSpec, Split};
use crate::tensor_parallel::TensorParallel;
use candle_core::{Result, Tensor};

/// A matrix `[V, C]`, of which each rank that shares the layer has some rows: one of its own, or the embedding.
#[derive(Debug, Clone)]
pub struct VocabHead {
    weight: String,
    tied: bool,
    /// Factor on the logits.
    scale: f64,
    softcap: Option<f32>,
}

impl VocabHead {
    /// Adds the matrix `[vocabulary, width]`.
    #[must_use]
    pub fn new(scope: &Scope, vocabulary: usize, width: usize) -> Self {
        let shard = ShardSpec::Rows(Split::Even("vocab_size"));
        Self {
            weight: scope.parameter("weight", &[vocabulary, width], shard, Init::Normal),
            tied: false,
            scale: 1.0,
            softcap: None,
        }
    }

    /// The embedding's table as the output head.
    #[must_use]
    pub fn tied_to(embedding: &VocabEmbedding) -> Self {
        Self { weight: embedding.weight_name().to_owned(), tied: true, scale: 1.0, softcap: None }
    }

    /// The same, where logits are multiplied with `scale`.
    #[must_use]
    pub fn with_scale(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// The same, where logits become `cap * tanh(logit / cap)`.
    #[must_use]
    pub fn with_softcap(self, softcap: Option<f32>) -> Self {
        Self { softcap, ..self }
    }

    /// The name of its matrix.
    #[must_use]
    pub fn weight_name(&self) -> &str {
        &self.weight
    }

    /// Whether its matrix is the embedding's.
    #[must_use]
    pub fn is_tied(&self) -> bool {
        self.tied
    }

    fn head(&self, weights: &StoredWeights) -> Result<OutputHead> {
        Ok(OutputHead { weight: parameter(weights, &self.weight)?.clone(), softcap: self.softcap })
    }

    /// The logits `[T, V]` of hidden states `[T, C]` behind the last norm, f32; where ranks share layers, of this rank's part of
    /// the vocabulary.
    ///
    /// # Errors
    /// A missing matrix, other shapes.
    pub fn logits(&self, hidden: &Tensor, weights: &StoredWeights) -> Result<Tensor> {
        loss::logits(&scaled(hidden, self.scale)?, self.head(weights)?)
    }

    /// ln p(target) of every token, from hidden states `[T, C]` behind the last norm; 0 where there is no target.
    ///
    /// # Errors
    /// As for [`log_probs`](loss::log_probs).
    pub fn log_probs(
        &self,
        hidden: &Tensor,
        targets: &[u32],
        weights: &StoredWeights,
        tp: &TensorParallel,
    ) -> Result<Vec<f32>> {
        loss::log_probs(&scaled(hidden, self.scale)?, self.head(weights)?, targets, tp)
    }

    /// Negative log-likelihood of the targets of all T tokens, from this rank's rows of hidden states behind the last norm; its
    /// gradient times `scale` in these rows, and, if it is trained, in the matrix.
    ///
    /// # Errors
    /// As for [`head_loss`](loss::head_loss).
    pub fn loss(
        &self,
        hidden: &Tensor,
        targets: &[u32],
        scale: f32,
        trained: bool,
        weights: &StoredWeights,
        tp: &TensorParallel,
    ) -> Result<HeadLoss> {
        let hidden = scaled(&tp.gather(hidden, targets.len())?, self.scale)?;
        let loss = loss::head_loss(&hidden, self.head(weights)?, targets, scale, trained, tp)?;
        Ok(HeadLoss { d_hidden: scaled(&tp.reduce(&loss.d_hidden)?, self.scale)?, ..loss })
    }
}
