//! Multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434).
//!
//! Shape letters: T tokens on this rank, C hidden size, H heads, L latent width, N and R widths of a head's parts without and
//! with rotary positions, Dv width of a head's values.

use super::{Attention, ColumnLinear, ForwardPass, ReplicatedLinear, RmsNorm, RotaryEmbedding, RowLinear};
use crate::cast::cast;
use crate::parameters::Scope;
use crate::shard::Split;
use crate::tape;
use candle_core::{DType, Result, Tensor};
use std::sync::Arc;

/// The epsilon of the norms of latent vectors, whatever that of the model's other norms is.
const EPS: f64 = 1e-6;

/// The widths of latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentWidths {
    /// The hidden size C.
    pub hidden: usize,
    /// The width of the latent vector from which queries are computed; `None` if they are computed from hidden states.
    pub queries: Option<usize>,
    /// The width L of the latent vector from which keys and values are computed.
    pub key_values: usize,
    /// The width N of a head's part without positions.
    pub nope: usize,
    /// The width R of a head's part with rotary positions.
    pub rope: usize,
    /// The width Dv of a head's values.
    pub value: usize,
}

impl LatentWidths {
    /// N + R, the width of a head of queries and keys.
    #[must_use]
    pub fn query_key(&self) -> usize {
        self.nope + self.rope
    }
}

/// Attention whose keys and values are computed from one narrow latent vector for each token. A head of queries and keys
/// begins with a part without positions, followed by a part with rotary positions, which the keys of all heads share. With
/// tensor parallelism, each rank has whole heads, and computes the latent vectors of its rows.
#[derive(Debug, Clone)]
pub struct LatentAttention {
    widths: LatentWidths,
    /// The linear layer and the norm that compute the latent vector of queries.
    q_a: Option<(ReplicatedLinear, RmsNorm)>,
    q_b: ColumnLinear,
    kv_a: ReplicatedLinear,
    kv_a_norm: RmsNorm,
    kv_b: ColumnLinear,
    rope: Arc<RotaryEmbedding>,
    attention: Attention,
    o_proj: RowLinear,
}

impl LatentAttention {
    /// Adds `q_proj`, or `q_a_proj`, `q_a_layernorm` and `q_b_proj`; and `kv_a_proj_with_mqa`, `kv_a_layernorm`, `kv_b_proj`
    /// and `o_proj` in `scope`. Of these, only layers from or to hidden states have a bias, if `bias` asks for it.
    #[must_use]
    pub fn new(
        scope: &Scope,
        widths: LatentWidths,
        bias: bool,
        attention: Attention,
        rope: Arc<RotaryEmbedding>,
    ) -> Self {
        let LatentWidths { hidden, queries, key_values, nope, value, .. } = widths;
        let heads = attention.heads();
        let narrow = |name: &str, width, bias| ReplicatedLinear::new(&scope.at(name), hidden, width, bias);
        let norm = |name: &str, width| RmsNorm::new(&scope.at(name), width, EPS);
        let of_heads = |name: &str, inputs, dim, split: Split| {
            ColumnLinear::new(&scope.at(name), inputs, heads.queries * dim, false, split)
        };
        let (q, kv) = (widths.query_key(), nope + value);
        let of_queries = Split::QueryHeads(heads, q);
        let (q_a, q_b) = match queries {
            None => (None, of_heads("q_proj", hidden, q, of_queries)),
            Some(latent) => (
                Some((narrow("q_a_proj", latent, bias), norm("q_a_layernorm", latent))),
                of_heads("q_b_proj", latent, q, of_queries),
            ),
        };
        Self {
            widths,
            q_a,
            q_b,
            kv_a: narrow("kv_a_proj_with_mqa", key_values + widths.rope, bias),
            kv_a_norm: norm("kv_a_layernorm", key_values),
            kv_b: of_heads("kv_b_proj", key_values, kv, Split::QueryHeads(heads, kv)),
            rope,
            attention: attention.with_head_dims(q, value),
            o_proj: RowLinear::from_heads(&scope.at("o_proj"), heads, value, hidden, bias),
        }
    }

    /// The attention of the layer.
    #[must_use]
    pub fn attention(&self) -> &Attention {
        &self.attention
    }

    /// Queries and keys `[T, H, D]` and values `[T, H, Dv]` of x `[rows, C]`, for this rank's heads.
    ///
    /// # Errors
    /// Missing parameters, failures of other ranks.
    pub fn inputs(&self, x: &Tensor, pass: &ForwardPass) -> Result<[Tensor; 3]> {
        let LatentWidths { key_values, nope, rope, value, .. } = self.widths;
        let q = match &self.q_a {
            Some((linear, norm)) => self.q_b.forward(&norm.forward(&linear.forward(x, pass)?, pass)?, pass)?,
            None => self.q_b.forward(x, pass)?,
        };
        let q = of_heads(&q, nope + rope)?;
        let rotated = self.rope.forward(q.narrow(2, nope, rope)?.contiguous()?, pass)?;
        let q = Tensor::cat(&[q.narrow(2, 0, nope)?, rotated], 2)?;

        let latent = self.kv_a.forward(x, pass)?;
        let shared = pass.gather(&latent.narrow(1, key_values, rope)?.contiguous()?)?;
        let latent = self.kv_a_norm.forward(&latent.narrow(1, 0, key_values)?.contiguous()?, pass)?;
        let kv = of_heads(&self.kv_b.forward(&latent, pass)?, nope + value)?;
        let (tokens, heads, _) = kv.dims3()?;
        let shared = for_heads(&self.rope.forward(shared.unsqueeze(1)?, pass)?, (tokens, heads, rope))?;
        let k = Tensor::cat(&[kv.narrow(2, 0, nope)?, shared], 2)?;
        let v = kv.narrow(2, nope, value)?.contiguous()?;
        Ok([q, k, v])
    }

    /// The projection of attention's output `[T, H * Dv]` to `[rows, C]`.
    ///
    /// # Errors
    /// Missing parameters, failures of other ranks.
    pub fn output(&self, attended: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        self.o_proj.forward(attended, pass)
    }
}

/// Repeats `[T, 1, R]` for all heads, to `[T, H, R]`.
fn for_heads(shared: &Tensor, shape: (usize, usize, usize)) -> Result<Tensor> {
    match shared.device().is_cpu() {
        // The gradient is a sum over heads, which candle would round to bf16 after each head.
        true => cast(&cast(shared, DType::F32)?.broadcast_as(shape)?.contiguous()?, shared.dtype()),
        false => shared.broadcast_as(shape)?.contiguous(),
    }
}

/// Reshapes `[T, H * dim]` to `[T, H, dim]`.
fn of_heads(flat: &Tensor, dim: usize) -> Result<Tensor> {
    let (tokens, width) = flat.dims2()?;
    tape::reshape(flat, (tokens, width / dim, dim))
}
