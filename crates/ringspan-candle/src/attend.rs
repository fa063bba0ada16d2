//! What a model needs to know about attention: how to call it, and where its tokens stand.

use crate::attention::Memory;
use crate::dropout::Drops;
use crate::experts::Experts;
use crate::tensor_parallel::TensorParallel;
use candle_core::{Result, Tensor};
use ringspan::{Mask, Score};

/// What attention is computed of: T tokens are at hand, H query heads share G key-value heads of width D and Dv.
#[derive(Debug, Clone, Copy)]
pub struct AttentionInputs<'a> {
    /// Queries `[T, H, D]`.
    pub q: &'a Tensor,
    /// Keys `[T, G, D]`.
    pub k: &'a Tensor,
    /// Values `[T, G, Dv]`.
    pub v: &'a Tensor,
    /// The score `[H]` of a key whose value is 0, which every query of a head sees; none without sinks.
    pub sinks: Option<&'a Tensor>,
}

impl<'a> AttentionInputs<'a> {
    /// Inputs without sinks.
    #[must_use]
    pub fn new(q: &'a Tensor, k: &'a Tensor, v: &'a Tensor) -> Self {
        Self { q, k, v, sinks: None }
    }
}

/// Attention as a model sees it. Who else holds tokens, and how keys and values reach this rank, is the implementation's
/// business.
pub trait Attend {
    /// Attention of `layer`, `[T, H, Dv]`, differentiable in its inputs. The numbers in `score` are constants; sinks are not
    /// among them.
    ///
    /// # Errors
    /// Shapes that do not fit, and failures of other ranks.
    fn attention(&self, layer: usize, inputs: &AttentionInputs, mask: &Mask, score: &Score) -> Result<Tensor>;

    /// The same for a layer that is computed twice: the first call fills `memory`, the second empties it and computes nothing
    /// but the backward. Without this method attention is computed twice.
    ///
    /// # Errors
    /// As for [`attention`](Self::attention).
    fn attention_keeping(
        &self,
        _memory: &mut Memory,
        layer: usize,
        inputs: &AttentionInputs,
        mask: &Mask,
        score: &Score,
    ) -> Result<Tensor> {
        self.attention(layer, inputs, mask, score)
    }

    /// The position of each of the T tokens inside its document.
    fn positions(&self) -> &[usize];

    /// Tokens of the longest document there is or will be, on any rank: the same number on every rank, and for all
    /// calls whose keys meet in one attention. Rotary embeddings that depend on the length are made for it.
    fn length(&self) -> usize;

    /// Who computes the experts of sparse layers. Who wraps another hands on its experts, and [`Local`](crate::experts::Local) is the answer of
    /// who knows no other: all are computed here.
    fn experts(&self) -> &dyn Experts;

    /// The ranks that share the width of layers. Who wraps another hands on its own, and
    /// [`WHOLE`](crate::tensor_parallel::WHOLE) is the answer of who shares with nobody.
    fn tensor_parallel(&self) -> &TensorParallel;

    /// What is dropped of the inputs of layers that have dropout; none where nothing is learnt. Who wraps another hands on
    /// its own, and must say so: without it a model would train with nothing dropped, and nobody would notice.
    fn drops(&self) -> Option<&Drops>;
}
