//! What a softmax leaves of each query: its weights are formed again from it, whatever the size of the scores.

use super::{Data, Floats, Kernel};
use crate::error::Result;

/// Maximum and sum of the softmax of each query over all its keys and its sink: a weight is `exp(score - max) / sum`.
///
/// Both are kept, and not the log-sum-exp alone: rounded at the size of a large score, that would make weights wrong by as much
/// as the rounding. In both passes a kernel computes a score with the same bits, so `score - max` is 0 or less, no weight
/// exceeds 1, and weights are as exact in the backward pass as in the forward pass.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Statistics<F = Vec<f32>> {
    /// Greatest score, or sink; -inf where a query saw nothing: `[H, Tq]`.
    pub max: F,
    /// Sum of `exp(score - max)`, at least 1; 0 where a query saw nothing: `[H, Tq]`.
    pub sum: F,
}

impl Statistics {
    /// Natural log-sum-exp `[H, Tq]`; -inf where a query saw nothing.
    pub fn lse(&self) -> Vec<f32> {
        self.max.iter().zip(&self.sum).map(|(max, sum)| (f64::from(*max) + f64::from(*sum).ln()) as f32).collect()
    }

    /// The same numbers where they lie.
    pub fn data(&self) -> Statistics<Data<'_>> {
        Statistics { max: Data::F32(&self.max), sum: Data::F32(&self.sum) }
    }
}

impl Statistics<Floats> {
    /// The same numbers where they lie.
    pub fn data(&self) -> Statistics<Data<'_>> {
        Statistics { max: self.max.data(), sum: self.sum.data() }
    }

    /// The same in the memory of the CPU.
    ///
    /// # Errors
    /// Failures of the kernel's device.
    pub fn to_host(self, kernel: &Kernel) -> Result<Statistics> {
        Ok(Statistics { max: kernel.to_host(self.max)?, sum: kernel.to_host(self.sum)? })
    }
}
