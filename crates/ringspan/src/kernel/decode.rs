//! One query against many cached keys: nothing is packed, every key and value is read once for its group of heads.
//!
//! Keys are cut into chunks that do not depend on the threads, and the chunks are merged in order ("flash decoding",
//! Dao et al., 2023): any number of threads gives the same bits.

use super::vector::Simd;
use super::{HeadMap, Partial, View};
use std::ops::Range;

/// Rows of a chunk.
pub(super) const CHUNK: usize = 1024;

/// What all chunks of a call share; q has one token.
pub(super) struct Decode<'a> {
    pub(super) q: View<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    pub(super) heads: &'a HeadMap,
    /// Factor on scores, times log2(e).
    pub(super) scale: f32,
}

impl Decode<'_> {
    /// Elements of the state of one head: greatest score, sum, weighted values.
    pub(super) fn state(&self) -> usize {
        2 + self.v.dim
    }

    /// The softmax states of the heads that read `kv`, over at most CHUNK rows, which all are visible.
    ///
    /// R and N, the shape of the packed kernels, have no meaning here.
    ///
    /// # Safety
    /// The instruction set must be enabled; `states` must have a state per head and `scores` CHUNK numbers per head.
    #[inline(always)]
    pub(super) unsafe fn chunk<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        kv: usize,
        rows: Range<usize>,
        states: &mut [f32],
        scores: &mut [f32],
    ) {
        let heads = self.heads.queries_of(kv);
        for (at, row) in rows.clone().enumerate() {
            let key = self.k.row(row, kv);
            for (i, head) in heads.clone().enumerate() {
                scores[i * CHUNK + at] = dot(simd, self.q.row(0, head), key) * self.scale;
            }
        }
        for (scores, state) in scores.chunks_exact_mut(CHUNK).zip(states.chunks_exact_mut(self.state())) {
            let (seen, rest) = scores.split_at_mut(rows.len());
            // The vectors run over the end; exp2 makes exact zeros of what lies there.
            rest.fill(f32::NEG_INFINITY);
            let max = seen.iter().fold(f32::NEG_INFINITY, |max, x| max.max(*x));
            let finite = simd.splat(max.max(f32::MIN));
            let mut sum = simd.splat(0.0);
            for scores in scores.chunks_exact_mut(S::LANES).take(rows.len().div_ceil(S::LANES)) {
                // SAFETY: the chunk has LANES numbers.
                unsafe {
                    let x = simd.exp2(simd.sub(simd.load(scores.as_ptr()), finite));
                    sum = simd.add(sum, x);
                    simd.store(scores.as_mut_ptr(), x);
                }
            }
            (state[0], state[1]) = (max, simd.sum(sum));
            state[2..].fill(0.0);
        }
        for (at, row) in rows.enumerate() {
            let value = self.v.row(row, kv);
            for (i, state) in states.chunks_exact_mut(self.state()).enumerate() {
                add(simd, &mut state[2..], scores[i * CHUNK + at], value);
            }
        }
    }

    /// Adds the states of a chunk to the running state of the query.
    pub(super) fn merge(&self, kv: usize, states: &[f32], partial: &mut Partial) {
        let states = states.chunks_exact(self.state());
        for (head, state) in self.heads.queries_of(kv).zip(states) {
            let max = partial.max[head].max(state[0]);
            // A number to measure -inf against, so that no NaN arises.
            let finite = max.max(f32::MIN);
            let (old, new) = ((partial.max[head] - finite).exp2(), (state[0] - finite).exp2());
            partial.max[head] = max;
            partial.sum[head] = partial.sum[head] * old + state[1] * new;
            let out = &mut partial.out[head * self.v.dim..][..self.v.dim];
            for (out, x) in out.iter_mut().zip(&state[2..]) {
                *out = *out * old + x * new;
            }
        }
    }
}

#[inline(always)]
fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let mut sum = simd.splat(0.0);
    let (a_vectors, b_vectors) = (a.chunks_exact(S::LANES), b.chunks_exact(S::LANES));
    let (a_rest, b_rest) = (a_vectors.remainder(), b_vectors.remainder());
    for (a, b) in a_vectors.zip(b_vectors) {
        // SAFETY: both chunks have LANES numbers.
        sum = unsafe { simd.fma(simd.load(a.as_ptr()), simd.load(b.as_ptr()), sum) };
    }
    let mut total = simd.sum(sum);
    for (a, b) in a_rest.iter().zip(b_rest) {
        total += a * b;
    }
    total
}

/// `to += factor * from`
#[inline(always)]
fn add<S: Simd>(simd: S, to: &mut [f32], factor: f32, from: &[f32]) {
    let whole = to.len() / S::LANES * S::LANES;
    let (to, to_rest) = to.split_at_mut(whole);
    let (from, from_rest) = from.split_at(whole);
    let factors = simd.splat(factor);
    for (to, from) in to.chunks_exact_mut(S::LANES).zip(from.chunks_exact(S::LANES)) {
        // SAFETY: both chunks have LANES numbers.
        unsafe { simd.store(to.as_mut_ptr(), simd.fma(factors, simd.load(from.as_ptr()), simd.load(to.as_ptr()))) };
    }
    for (to, from) in to_rest.iter_mut().zip(from_rest) {
        *to += factor * from;
    }
}
