//! The backward pass: five products per block of keys and block of queries, with weights recomputed from softmax
//! statistics.
//!
//! S^T and dP^T have queries in the lanes; dV += P^T dO, dK += dS^T Q and dQ += dS K have the head width in the lanes. So
//! P^T and dS^T are only broadcast, and nothing is transposed in the loop. Source: Dao, 2023 (arXiv:2307.08691), algorithm
//! 2, with keys in the outer loop.
//!
//! In bf16 a product sums over pairs, so P^T and dS^T are stored in pairs along the lanes (for dV and dK), and dS^T also in
//! pairs along the keys (for dQ).

mod block_step;
mod buffers;

pub(super) use buffers::BufferSizes;

use super::buffer::Target;
use super::dispatch::dispatch;
use super::isa::TargetFeatures;
use super::pack::{copy, is_finite, operand_columns, panels};
use super::plan::Plan;
use super::scaling::Scaling;
use super::terms::ScoreTerms;
use super::vector::{PORTABLE_COLUMNS, Simd};
use super::{HeadMap, KEY_BLOCK, View};
use block_step::BlockStep;
use buffers::{KeyBlock, QueryBlock};
use std::ops::Range;

/// Number of rows of the micro kernel in products whose lanes run along the head width.
const ROWS: usize = 4;

/// The tensors and parameters that all workers of a call share.
pub(super) struct Backward<'a> {
    pub(super) q: View<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    pub(super) d_out: View<'a>,
    /// Maximum of the softmax, `[H, Tq]`.
    pub(super) max: &'a [f32],
    /// Sum of the softmax, `[H, Tq]`.
    pub(super) sum: &'a [f32],
    /// Row sums of `out * d_out`, `[H, Tq]`.
    pub(super) delta: &'a [f32],
    pub(super) heads: &'a HeadMap,
    pub(super) plan: &'a Plan<'a>,
    pub(super) features: TargetFeatures,
    pub(super) scale: f32,
    pub(super) scaling: Scaling,
    pub(super) terms: Option<&'a ScoreTerms<'a>>,
    /// Gradient of the bias, `[Tq, H or 1, Sk]`; each row is written by one worker only.
    pub(super) d_bias: Target,
    pub(super) bias: Option<View<'a>>,
    /// Gradient of the queries, `[Tq, H, D]`.
    pub(super) dq: Target,
}

/// The sums to which a worker adds the gradients of one key-value head's keys and values.
#[derive(Clone, Copy)]
pub(super) struct KeySums {
    pub(super) dk: Target,
    pub(super) dv: Target,
    /// Elements from one row to the next, for dk and dv.
    pub(super) strides: (usize, usize),
    /// Offset of the head in its row in elements, for dk and dv.
    pub(super) offsets: (usize, usize),
}

/// A worker's unit of work: a head, a range of its blocks, and the sums for their gradients.
pub(super) struct HeadTask<'a> {
    /// The query head.
    pub(super) head: usize,
    pub(super) blocks: Range<usize>,
    pub(super) sums: KeySums,
    /// Gradient of the head's buckets, `[count]`.
    pub(super) table: &'a mut [f64],
    /// Function that is called between blocks of keys.
    pub(super) progress: &'a dyn Fn(),
}

impl Backward<'_> {
    /// Adds the contribution of a task to dq, and to the gradients of keys and values in its sums.
    ///
    /// # Safety
    /// No two concurrent calls may have the same head and block, or the same rows of sums. `scratch` must have at least the
    /// size of `BufferSizes::scratch`.
    #[inline(always)]
    pub(super) unsafe fn head<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        task: HeadTask,
        scratch: &mut [f32],
    ) {
        let HeadTask { head, blocks, sums, table, progress } = task;
        let sizes = BufferSizes::new(self.q.dim, self.v.dim, self.features, self.bias.is_some());
        let (queries, rest) = scratch.split_at_mut(blocks.len() * sizes.block());
        let mut has_non_finite = Vec::with_capacity(blocks.len());
        for (buffer, block) in queries.chunks_exact_mut(sizes.block()).zip(blocks.clone()) {
            has_non_finite.push(self.pack_queries(simd, sizes, head, block, &mut QueryBlock::of(sizes, buffer)));
        }
        let mut at = KeyBlock::of(sizes, rest, table);
        let kv = self.heads.kv_of(head);
        let visible = &self.plan.keys;
        for base in (visible.start / R * R..visible.end).step_by(KEY_BLOCK) {
            let rows = base..(base + KEY_BLOCK).min(visible.end);
            let mut packed = false;
            for (i, block) in blocks.clone().enumerate() {
                for part in self.plan.parts(block) {
                    let (from, to) = (part.any.start.max(rows.start), part.any.end.min(rows.end));
                    if from >= to {
                        continue;
                    }
                    if !packed {
                        self.pack_keys::<S, R>(simd, sizes, kv, &rows, &mut at);
                        packed = true;
                    }
                    let keys = (from - base) / R * R..(to - base).next_multiple_of(R);
                    let (now, next) = queries[i * sizes.block()..].split_at_mut(sizes.block());
                    let next = &next[..next.len().min(sizes.block())];
                    let step = BlockStep {
                        head,
                        block,
                        part,
                        base,
                        keys,
                        has_non_finite: has_non_finite[i] || at.has_non_finite,
                        next,
                    };
                    let mut queries = QueryBlock::of(sizes, now);
                    // SAFETY: the buffers have these sizes; the panels lie within KEY_BLOCK.
                    unsafe { self.step::<S, R, N>(simd, sizes, &step, &mut queries, &mut at) };
                }
            }
            if packed {
                progress();
                for (i, row) in rows.enumerate() {
                    // SAFETY: only this worker accesses these rows of this head.
                    let (dk, dv) = unsafe {
                        (
                            sums.dk.row(row * sums.strides.0 + sums.offsets.0, self.k.dim),
                            sums.dv.row(row * sums.strides.1 + sums.offsets.1, self.v.dim),
                        )
                    };
                    add(dk, &at.dk[i * sizes.wide..]);
                    add(dv, &at.dv[i * sizes.v_wide..]);
                }
            }
        }
        for (buffer, block) in queries.chunks_exact_mut(sizes.block()).zip(blocks) {
            let dq = QueryBlock::of(sizes, buffer).dq;
            for (i, row) in self.plan.rows(block).enumerate() {
                // SAFETY: only this worker accesses the rows of this head and block.
                let to = unsafe { self.dq.row((row * self.q.heads + head) * self.q.dim, self.q.dim) };
                add(to, &dq[i * sizes.wide..]);
            }
        }
    }

    /// Packs Q^T, dO^T, Q, dO, a zero dQ, and the statistics of each lane. Returns whether any of it is not finite.
    #[inline(always)]
    fn pack_queries<S: Simd>(
        &self,
        simd: S,
        sizes: BufferSizes,
        head: usize,
        block: usize,
        to: &mut QueryBlock,
    ) -> bool {
        let (rows, lanes) = (self.plan.rows(block), sizes.lanes);
        let row = |lane: usize| {
            let row = rows.start + lane;
            (lane < rows.len() && self.plan.sees_anything(row)).then_some(row)
        };
        let (q_row, d_row) = (|lane| Some(self.q.at(row(lane)?, head)), |lane| Some(self.d_out.at(row(lane)?, head)));
        operand_columns(simd, to.q_t, self.q.dim, lanes, self.scaling.queries, q_row);
        operand_columns(simd, to.d_out_t, self.v.dim, lanes, 1.0, d_row);
        copy(simd, &mut to.q[..lanes / S::PAIR * sizes.wide], sizes.wide, self.scale, q_row);
        copy(simd, &mut to.d_out[..lanes / S::PAIR * sizes.v_wide], sizes.v_wide, 1.0, d_row);
        to.dq.fill(0.0);
        let mut all_finite = is_finite::<S>(to.q) && is_finite::<S>(to.d_out);
        for lane in 0..lanes {
            // A query that sees nothing has the maximum +inf, which makes all its weights exactly 0.
            let at = row(lane).map(|row| head * self.q.tokens + row).filter(|&at| self.sum[at] != 0.0);
            to.statistics[lane] = at.map_or(f32::INFINITY, |at| self.max[at]);
            to.statistics[lanes + lane] = at.map_or(0.0, |at| 1.0 / self.sum[at]);
            to.statistics[2 * lanes + lane] = at.map_or(0.0, |at| self.delta[at]);
            // The maximum ignores NaN, but the sum shows it.
            all_finite &= !to.statistics[lanes + lane].is_nan() && to.statistics[2 * lanes + lane].is_finite();
        }
        !all_finite
    }

    /// Packs K and V in panels and K in rows, and zeroes dK and dV.
    #[inline(always)]
    fn pack_keys<S: Simd, const R: usize>(
        &self,
        simd: S,
        sizes: BufferSizes,
        kv: usize,
        rows: &Range<usize>,
        to: &mut KeyBlock,
    ) {
        let row = |i: usize| {
            let row = rows.start + i;
            (row < rows.end && self.plan.sees_key(row)).then_some(row)
        };
        let (k_row, v_row) = (|i| Some(self.k.at(row(i)?, kv)), |i| Some(self.v.at(row(i)?, kv)));
        let count = rows.len().next_multiple_of(R);
        panels::<S, R>(simd, to.k_panels, self.k.dim, count, k_row);
        panels::<S, R>(simd, to.v_panels, self.v.dim, count, v_row);
        copy(simd, &mut to.k[..count / S::PAIR * sizes.wide], sizes.wide, self.scale, k_row);
        to.dk.fill(0.0);
        to.dv.fill(0.0);
        let (k, v) = (&to.k_panels[..count * sizes.depth], &to.v_panels[..count * sizes.v_depth]);
        to.has_non_finite = !(is_finite::<S>(k) && is_finite::<S>(v));
    }
}

#[inline(always)]
fn add(to: &mut [f32], from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += from;
    }
}

dispatch!(
    backward_head,
    Backward<'_>,
    head<[8, 3], [4, 3], [4, PORTABLE_COLUMNS]>(task: HeadTask<'_>, scratch: &mut [f32]),
    "Calls [`Backward::head`] compiled for the instruction set of `features`."
);
