//! What a model needs to know about attention: how to call it, and where its tokens stand.

use crate::attention::Kept;
use candle_core::{Result, Tensor};
use ringspan::Mask;

/// Attention as a model sees it. T tokens are at hand, H query heads share G key-value heads of width D and Dv.
///
/// Who else holds tokens, and how keys and values reach this rank, is the implementation's business.
pub trait Attend {
    /// Attention of `layer`: q `[T, H, D]`, k `[T, G, D]`, v `[T, G, Dv]` to `[T, H, Dv]`, differentiable.
    ///
    /// # Errors
    /// Shapes that do not fit, and failures of other ranks.
    fn attention(&self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor, mask: &Mask, scale: f32) -> Result<Tensor>;

    /// The same for a layer that is computed twice: the first call fills `kept`, the second takes it and computes nothing
    /// but the backward. Without this method attention is computed twice.
    ///
    /// # Errors
    /// As for [`attention`](Self::attention).
    #[expect(clippy::too_many_arguments, reason = "those of attention, and one more")]
    fn attention_keeping(
        &self,
        _kept: &mut Option<Kept>,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: &Mask,
        scale: f32,
    ) -> Result<Tensor> {
        self.attention(layer, q, k, v, mask, scale)
    }

    /// The position of each of the T tokens inside its document.
    fn positions(&self) -> &[usize];
}
