//! Weights that stay in memory as GGUF and gpt-oss files store them: blocks of small integers with scales.
//!
//! A [`QuantizedMatrix`] is never expanded to f32 as a whole. A product with many tokens decodes a part of it at a time, while it
//! packs it, and multiplies that in f32; a product with a few tokens decodes blocks where it multiplies them, in registers or in the L1
//! cache. Unless asked to, a product does not round activations, so results equal those of the decoded matrix up to the rounding of sums.
//! [`ActivationDType::Int16`](crate::ActivationDType) asks for activations of 16 bits and products in integers.

mod blocks;
mod dots;
mod format;
mod gpt_oss;
mod input;
mod int16;
mod lanes;
mod linear;
mod matrix;
mod stack;
mod tiles;

#[cfg(test)]
mod tests;

pub use format::Format;
pub use linear::{forward_scratch, linear_quantized, linear_quantized_recomputed};
pub(crate) use linear::{product_quantized, product_quantized_t};
pub use matrix::QuantizedMatrix;
pub use stack::QuantizedStack;
pub use tiles::backward_scratch;
