//! The softmax statistics of each query, from which its weights can be recomputed for scores of any size.

use super::{Data, Floats};

/// Maximum and sum of each query's softmax over all its keys and its sink: a weight is `exp(score - max) / sum`.
///
/// Both are stored, and not only the log-sum-exp: if scores are large, its rounding error would be an error of the weights.
/// In both passes a kernel computes a score with the same bits, so `score - max` is at most 0, no weight exceeds 1, and
/// weights are as exact in the backward pass as in the forward pass.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Statistics<F = Vec<f32>> {
    /// The largest score or sink, `[H, Tq]`; -inf for a query that sees nothing.
    pub max: F,
    /// Sum of `exp(score - max)`, `[H, Tq]`: at least 1, or 0 for a query that sees nothing.
    pub sum: F,
}

impl Statistics {
    /// Natural log-sum-exp `[H, Tq]`; -inf for a query that sees nothing.
    pub fn lse(&self) -> Vec<f32> {
        self.max.iter().zip(&self.sum).map(|(max, sum)| (f64::from(*max) + f64::from(*sum).ln()) as f32).collect()
    }

    /// Borrows the statistics.
    pub fn data(&self) -> Statistics<Data<'_>> {
        Statistics { max: Data::F32(&self.max), sum: Data::F32(&self.sum) }
    }
}

impl Statistics<Floats> {
    /// Borrows the statistics.
    pub fn data(&self) -> Statistics<Data<'_>> {
        Statistics { max: self.max.data(), sum: self.sum.data() }
    }
}
