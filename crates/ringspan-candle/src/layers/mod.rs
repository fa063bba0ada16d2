//! The layers that models are made of. A layer knows the names and shapes of its parameters but holds no values: they come
//! with each [`ForwardPass`]. It distributes its work over ranks (tensor and expert parallelism), applies adapters and
//! dropout, and stores the activations for the backward pass that it is asked to store. It also accepts inputs without rows,
//! since a rank without tokens must take part in collectives.
//!
//! Shape letters: T tokens on this rank, C hidden size, H query heads, G key-value heads, D head width, V vocabulary. Between
//! layers x is `[T, C]`; with tensor parallelism, this rank's rows of it.

mod all_heads_norm;
mod attention;
mod column_linear;
mod forward_pass;
mod gated_mlp;
mod latent_attention;
mod layer_norm;
mod mixture_of_experts;
mod mlp;
mod projection;
mod qkv_linear;
mod replicated_linear;
mod rms_norm;
mod rotary_embedding;
mod router;
mod row_linear;
mod stacked_experts;
mod vocab_embedding;
mod vocab_head;

pub use all_heads_norm::AllHeadsNorm;
pub use attention::Attention;
pub use column_linear::ColumnLinear;
pub use forward_pass::ForwardPass;
pub use gated_mlp::GatedMlp;
pub use latent_attention::{LatentAttention, LatentWidths};
pub use layer_norm::LayerNorm;
pub use mixture_of_experts::MixtureOfExperts;
pub use mlp::Mlp;
pub use qkv_linear::QkvLinear;
pub use replicated_linear::ReplicatedLinear;
pub use rms_norm::RmsNorm;
pub use rotary_embedding::{ByLength, RotaryEmbedding, inverse_frequencies};
pub use router::{ExpertGroups, Router, Scoring};
pub use row_linear::RowLinear;
pub use vocab_embedding::VocabEmbedding;
pub use vocab_head::VocabHead;

use crate::cast::cast;
use candle_core::{DType, Result, Tensor};

/// Multiplies x by a factor from the model's configuration.
///
/// # Errors
/// Failures of the device.
pub fn scaled(x: &Tensor, factor: f64) -> Result<Tensor> {
    // A GPU refuses to start a kernel for a tensor without elements.
    if factor == 1.0 || x.elem_count() == 0 {
        return Ok(x.clone());
    }
    match x.device().is_cpu() {
        // Candle would round the factor to bf16, too.
        true => cast(&(cast(x, DType::F32)? * factor)?, x.dtype()),
        false => x * factor,
    }
}

/// Adds a bias `[N]` to x `[T, N]`.
fn with_bias(x: &Tensor, bias: &Tensor) -> Result<Tensor> {
    match x.device().is_cpu() {
        // Candle would round the bias's gradient to bf16 after adding each row.
        true => cast(&cast(x, DType::F32)?.broadcast_add(&cast(bias, DType::F32)?)?, x.dtype()),
        false => x.broadcast_add(bias),
    }
}
