//! Products of activations with quantized weights in integers.
//!
//! A quantized weight is a code of at most eight bits times a scale that a block of weights shares. Here the activations are rounded, too:
//! each 32 of a token to integers of 16 bits with a common scale, so that a rounding error is at most 2^-16 of the largest of the 32.
//! Products of both integers, and their sums over a block, are exact; they are scaled and added in f32, in the order of columns. So the
//! bits of a token's result depend neither on the other tokens nor on the number of threads. Compared with products in f32, a vector
//! instruction multiplies twice as many numbers.
//!
//! An infinity or NaN among the activations makes all results of its token NaN.

mod activations;
mod instructions;
mod lanes;
mod multiply;
mod panel;
#[cfg(test)]
mod test;

pub use activations::RoundedActivations;
pub use instructions::Instructions;
pub use multiply::PanelSums;
pub use panel::{Panels, RowCodes};

/// Number of activations that share a scale.
pub const BLOCK: usize = 32;
/// Number of columns that are packed and multiplied at once.
pub const COLUMNS: usize = 256;
/// Number of rows of weights in a panel: each has a lane of its own in vectors of sums.
pub const ROWS: usize = 16;

/// How the weights of a row share scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    /// Each 16 weights have a scale.
    Of16,
    /// Each 32 weights have a scale.
    Of32,
    /// Each 32 weights have a scale and a minimum, which is subtracted from each scaled code.
    Of32WithMinima,
}
