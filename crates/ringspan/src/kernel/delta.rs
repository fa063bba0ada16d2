//! Delta: row sums of `out * d_out`, which the backward pass subtracts from the gradient of each weight.

use super::View;
use super::buffer::{Target, lines};
use super::dispatch::dispatch;
use super::pack::columns;
use super::vector::Simd;

/// The computation of delta `[H, Tq]` from out and d_out `[Tq, H, Dv]`.
///
/// A lane sums along the head width in the same order as the product dP = dO V^T. So if one key has all the weight, out is
/// its value, dP and delta have the same bits, and their difference is exactly 0.
pub(super) struct Delta<'a> {
    pub(super) out: View<'a>,
    pub(super) d_out: View<'a>,
    /// The result, `[H, Tq]`.
    pub(super) delta: Target,
}

/// Number of elements of a worker's scratch buffer.
pub(super) fn scratch(dim: usize, vector: usize) -> usize {
    2 * lines(dim * vector)
}

impl Delta<'_> {
    /// Computes the row sums of one head.
    ///
    /// # Safety
    /// The instruction set must be enabled, `scratch` have the size of [`scratch`], and no other thread write this head.
    #[inline(always)]
    pub(super) unsafe fn head<S: Simd>(&self, simd: S, head: usize, scratch: &mut [f32]) {
        let View { tokens, dim, .. } = self.d_out;
        let (out, d_out) = scratch.split_at_mut(scratch.len() / 2);
        // SAFETY: this head is the caller's.
        let delta = unsafe { self.delta.row(head * tokens, tokens) };
        for (block, delta) in delta.chunks_mut(S::LANES).enumerate() {
            let token = |lane: usize| Some(block * S::LANES + lane).filter(|&token| token < tokens);
            columns(simd, out, dim, S::LANES, 1.0, |lane| Some(self.out.at(token(lane)?, head)));
            columns(simd, d_out, dim, S::LANES, 1.0, |lane| Some(self.d_out.at(token(lane)?, head)));
            let mut sum = simd.splat(0.0);
            let mut sums = [0.0; 16];
            // SAFETY: both hold [dim][LANES]; no vector has more than 16 numbers.
            unsafe {
                for d in 0..dim {
                    let (a, b) = (out.as_ptr().add(d * S::LANES), d_out.as_ptr().add(d * S::LANES));
                    sum = simd.fma(simd.load(a), simd.load(b), sum);
                }
                simd.store(sums.as_mut_ptr(), sum);
            }
            delta.copy_from_slice(&sums[..delta.len()]);
        }
    }
}

dispatch!(delta_head, Delta<'_>, head<[], [], []>(head: usize, scratch: &mut [f32]), "Calls [`Delta::head`] compiled for the instruction set of `features`.");
