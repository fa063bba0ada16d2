//! Attention of this rank's queries over the keys of all ranks, for tensors with a batch dim.

use super::Context;
use crate::attend::AttentionInputs;
use crate::attention::attention;
use candle_core::{Result, Tensor, bail};
use ringspan::{Mask, Score};

/// The order of the dims of queries, keys, values and outputs: B batch, T tokens of this rank, H heads, D head width.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QkvFormat {
    /// `[B, T, H, D]`.
    #[default]
    Bshd,
    /// `[B, H, T, D]`, as PyTorch's `scaled_dot_product_attention` has it.
    Bhsd,
}

impl Context {
    /// Attention with the context's mask and the scale 1/sqrt(D), over the tokens of all ranks; differentiable.
    ///
    /// In the context's [format](QkvFormat): queries `[B, T, H, D]`, keys `[B, Tk, G, D]` and values `[B, Tk, G, Dv]` of this
    /// rank, in f32 or bf16, give `[B, T, H, Dv]`. H must be a multiple of G: heads are shared as in grouped-query attention.
    /// All ranks must call this in the same order, also those without tokens, and differentiate it in the same order.
    ///
    /// # Errors
    /// Shapes and types other than these, and failures of other ranks.
    pub fn attention(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let scale = 1.0 / (q.dim(candle_core::D::Minus1)?.max(1) as f32).sqrt();
        self.attention_with(&AttentionInputs::new(q, k, v), &self.mask, Score::new(scale))
    }

    /// Like [`attention`](Self::attention), with another mask, other score parameters (scale, softcap, ALiBi, T5 buckets,
    /// dropout of weights), sinks `[H]`, a bucket table `[H, count]`, or a bias: `[B, T, H, Sk]` or `[B, T, 1, Sk]`, in format
    /// [`QkvFormat::Bhsd`] `[B, H, T, Sk]` or `[B, 1, T, Sk]`, for this rank's queries and all keys of a row. All three are
    /// differentiable; the gradients of sinks and bucket table are sums over ranks, like those of any
    /// [parameter](Self::all_reduce_gradients).
    ///
    /// Dropout drops the same weights on every mesh.
    ///
    /// # Errors
    /// As for [`attention`](Self::attention).
    pub fn attention_with(&self, inputs: &AttentionInputs, mask: &Mask, score: Score) -> Result<Tensor> {
        let [queries, keys] = self.local_batches();
        let q = self.without_batch(inputs.q, queries, "queries")?;
        let (k, v) = (self.without_batch(inputs.k, keys, "keys")?, self.without_batch(inputs.v, keys, "values")?);
        let bias = inputs.bias.map(|bias| self.without_batch(bias, queries, "bias")).transpose()?;
        let flat = AttentionInputs { q: &q, k: &k, v: &v, bias: bias.as_ref(), ..*inputs };
        let out = attention(&self.group, &self.schedule_of(&flat, mask)?, &flat, score)?;
        let (_, heads, dim) = out.dims3()?;
        let out = out.reshape((queries.0, queries.1, heads, dim))?;
        if self.qkv_format == QkvFormat::Bhsd { out.transpose(1, 2) } else { Ok(out) }
    }

    /// The tensor as `[T, H, D]`, with the tokens of all batch rows.
    fn without_batch(&self, x: &Tensor, (rows, tokens): (usize, usize), what: &str) -> Result<Tensor> {
        let is_bhsd = self.qkv_format == QkvFormat::Bhsd && x.rank() == 4;
        let bshd = if is_bhsd { x.transpose(1, 2)? } else { x.clone() };
        match bshd.dims() {
            [r, t, ..] if (*r, *t) == (rows, tokens) && bshd.rank() == 4 => bshd.contiguous()?.flatten(0, 1),
            _ => {
                let expected = match self.qkv_format {
                    QkvFormat::Bshd => format!("[{rows}, {tokens}, heads, width]"),
                    QkvFormat::Bhsd => format!("[{rows}, heads, {tokens}, width]"),
                };
                bail!("rank {} holds {what} of shape {expected}, given {:?}", self.group.rank(), x.dims())
            }
        }
    }
}
