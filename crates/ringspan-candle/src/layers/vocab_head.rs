//! The output head, which turns hidden states into logits over the vocabulary.

use super::forward_pass::parameter;
use super::{VocabEmbedding, scaled};
use crate::loss::{self, HeadLoss, OutputHead};
use crate::parameters::{Init, Scope, StoredWeights};
use crate::shard::{ShardSpec, Split};
use crate::tensor_parallel::TensorParallel;
use candle_core::{Result, Tensor};

/// The output head's matrix `[V, C]`, its own or the embedding's; with tensor parallelism, each rank has some of its rows.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan_candle::TensorParallel;
/// use ringspan_candle::layers::VocabHead;
/// use ringspan_candle::model::{ModelBuilder, StoredWeights, Unit};
///
/// let builder = ModelBuilder::new();
/// let head = VocabHead::new(&builder.unit(Unit::Head, "lm_head"), 2, 1);
/// let matrix = Tensor::new(&[[1f32], [-1.0]], &Device::Cpu)?;
/// let weights = StoredWeights::from([(head.weight_name().to_owned(), matrix.into())]);
/// let hidden = Tensor::new(&[[0f32], [3.0]], &Device::Cpu)?;
/// assert_eq!(head.logits(&hidden, &weights)?.to_vec2::<f32>()?, [[0.0, 0.0], [3.0, -3.0]]);
/// let log_probs = head.log_probs(&hidden, &[0, 1], &weights, &TensorParallel::default())?;
/// assert!((log_probs[0] - 0.5f32.ln()).abs() < 1e-6 && (log_probs[1] + 6.0025).abs() < 1e-3);
/// # Ok::<_, candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct VocabHead {
    weight: String,
    tied: bool,
    /// Factor of the logits.
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

    /// An output head that uses the table of the embedding.
    #[must_use]
    pub fn tied_to(embedding: &VocabEmbedding) -> Self {
        Self { weight: embedding.weight_name().to_owned(), tied: true, scale: 1.0, softcap: None }
    }

    /// Multiplies logits by `scale`.
    #[must_use]
    pub fn with_scale(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// Turns logits into `cap * tanh(logit / cap)`.
    #[must_use]
    pub fn with_softcap(self, softcap: Option<f32>) -> Self {
        Self { softcap, ..self }
    }

    /// The name of the matrix.
    #[must_use]
    pub fn weight_name(&self) -> &str {
        &self.weight
    }

    /// Whether the matrix is the embedding's table.
    #[must_use]
    pub fn is_tied(&self) -> bool {
        self.tied
    }

    fn head(&self, weights: &StoredWeights) -> Result<OutputHead> {
        Ok(OutputHead { weight: parameter(weights, &self.weight)?.clone(), softcap: self.softcap })
    }

    /// The logits `[T, V]` of hidden states `[T, C]` after the last norm, f32; with tensor parallelism, those of this rank's
    /// shard of the vocabulary.
    ///
    /// # Errors
    /// A missing matrix, other shapes.
    pub fn logits(&self, hidden: &Tensor, weights: &StoredWeights) -> Result<Tensor> {
        loss::logits(&scaled(hidden, self.scale)?, self.head(weights)?)
    }

    /// ln p(target) of every token, from hidden states `[T, C]` after the last norm; 0 for tokens without a target.
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

    /// The negative log-likelihood of the targets of all T tokens, from this rank's rows of hidden states after the last
    /// norm; with its gradient times `scale` with respect to these rows and, if it is trained, to the matrix.
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
