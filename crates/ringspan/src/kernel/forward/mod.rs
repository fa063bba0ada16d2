//! The forward pass over one block of queries: an online softmax with the queries in the lanes.
//!
//! Scores are stored as S^T `[key][query]`, so row maxima, row sums, rescaling and masks are operations on whole vectors,
//! without reductions across lanes. Sources: Dao, 2023 (arXiv:2307.08691); Goto and van de Geijn, 2008, for the packing.

mod block_step;

use super::buffer::{Target, lines};
use super::dispatch::dispatch;
use super::isa::TargetFeatures;
use super::pack::{self, PackedKv};
use super::plan::Plan;
use super::scaling::Scaling;
use super::terms::ScoreTerms;
use super::vector::{PORTABLE_COLUMNS, Simd};
use super::view::Data;
use super::{KEY_BLOCK, View};
use block_step::{BlockStep, Buffers};

/// The tensors and parameters that all blocks of a call share.
pub(super) struct Forward<'a> {
    pub(super) q: View<'a>,
    pub(super) plan: &'a Plan<'a>,
    pub(super) keys: &'a PackedKv,
    pub(super) v_dim: usize,
    pub(super) scaling: Scaling,
    pub(super) terms: Option<&'a ScoreTerms<'a>>,
    /// Output, `[Tq, H, Dv]`.
    pub(super) out: Target,
    /// Maximum of the softmax, `[H, Tq]`.
    pub(super) max: Target,
    /// Sum of the softmax, `[H, Tq]`.
    pub(super) sum: Target,
}

/// Number of elements of a worker's scratch buffer; the packed keys are shared.
pub(super) fn scratch(dim: usize, v_dim: usize, features: TargetFeatures, bias: bool) -> usize {
    let (lanes, bias) = (features.lanes(), ScoreTerms::scratch(bias, features.lanes()));
    let out = lines(lanes * v_dim.next_multiple_of(features.rows()));
    lines(lanes * dim.div_ceil(features.pair())) + out + lines(lanes * KEY_BLOCK) + bias
}

/// A block of the queries of a head.
#[derive(Clone, Copy)]
pub(super) struct BlockTask {
    pub(super) head: usize,
    /// The slot of the packed keys that has the key-value head of `head`.
    pub(super) slot: usize,
    pub(super) block: usize,
}

/// The softmax state of one block, with the queries in the lanes.
struct BlockState<V, const N: usize> {
    max: [V; N],
    sum: [V; N],
}

impl Forward<'_> {
    /// Adds the plan's keys that are in the packed rows to the state of one head and block, computing R keys by at most N
    /// vectors of queries at a time.
    ///
    /// # Safety
    /// No two concurrent calls may have the same head and block. The keys and values of the head must have been packed, and
    /// stay in their slot meanwhile; `scratch` must have the size of [`scratch`].
    #[inline(always)]
    pub(super) unsafe fn block<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        task: BlockTask,
        scratch: &mut [f32],
    ) {
        // The last block may have fewer queries.
        let vectors = self.plan.rows(task.block).len().div_ceil(S::LANES);
        // SAFETY: the contract of the caller.
        unsafe {
            match vectors {
                1 => self.vectors::<S, R, 1>(simd, task, scratch),
                2 => self.vectors::<S, R, 2>(simd, task, scratch),
                _ => self.vectors::<S, R, N>(simd, task, scratch),
            }
        }
    }

    /// Computes a [`block`](Self::block) whose queries fill N vectors.
    ///
    /// # Safety
    /// As for `block`.
    #[inline(always)]
    unsafe fn vectors<S: Simd, const R: usize, const N: usize>(&self, simd: S, task: BlockTask, scratch: &mut [f32]) {
        let BlockTask { head, block, .. } = task;
        let lanes = N * S::LANES;
        let (dim, v_dim) = (self.q.dim, self.v_dim);
        let rows = self.plan.rows(block);
        let (q, rest) = scratch.split_at_mut(lines(lanes * dim.div_ceil(S::PAIR)));
        let (out, rest) = rest.split_at_mut(lines(lanes * v_dim.next_multiple_of(R)));
        let (p, bias) = rest.split_at_mut(lines(lanes * KEY_BLOCK));
        pack::operand_columns(simd, q, dim, lanes, self.scaling.queries, |lane| {
            (lane < rows.len()).then(|| self.q.at(rows.start + lane, head))
        });

        // SAFETY: only this call accesses the rows of this head and block.
        let (max, sum) = unsafe {
            let at = head * self.q.tokens + rows.start;
            (self.max.row(at, rows.len()), self.sum.row(at, rows.len()))
        };
        // The maximum ignores NaN, but the sum shows it.
        let fresh = max.iter().all(|max| *max == f32::NEG_INFINITY) && sum.iter().all(|sum| *sum == 0.0);
        if fresh {
            out.fill(0.0);
        } else {
            pack::columns(simd, out, v_dim, lanes, 1.0, |lane| {
                // SAFETY: only this call accesses the rows of this head and block.
                (lane < rows.len()).then(|| Data::F32(unsafe { self.out_row(rows.start + lane, head) }))
            });
            out[v_dim * lanes..].fill(0.0);
        }
        let (mut max_lanes, mut sum_lanes) = ([f32::NEG_INFINITY; 64], [0.0; 64]);
        max_lanes[..rows.len()].copy_from_slice(max);
        sum_lanes[..rows.len()].copy_from_slice(sum);
        let mut state = BlockState { max: [simd.splat(0.0); N], sum: [simd.splat(0.0); N] };
        for v in 0..N {
            // SAFETY: N * LANES is at most 64.
            unsafe {
                state.max[v] = simd.load(max_lanes.as_ptr().add(v * S::LANES));
                state.sum[v] = simd.load(sum_lanes.as_ptr().add(v * S::LANES));
            }
        }

        let mut at = Buffers { q, out, p, bias };
        let segment = self.keys.base..self.keys.base + self.keys.rows;
        for part in self.plan.parts(block) {
            let any = part.any_in(&segment);
            if any.is_empty() {
                continue;
            }
            let first = (any.start - segment.start) / R * R;
            let end = (any.end - segment.start).next_multiple_of(R);
            for from in (first..end).step_by(KEY_BLOCK) {
                let keys = from..end.min(from + KEY_BLOCK);
                let base = segment.start + from;
                let border = part.hides_some(base..base + keys.len());
                let step = BlockStep { task, part, keys, base, border };
                // SAFETY: the buffers have the sizes for these lanes and at most KEY_BLOCK keys.
                unsafe { self.step::<S, R, N>(simd, &step, &mut at, &mut state) };
            }
        }

        for v in 0..N {
            // SAFETY: N * LANES is at most 64.
            unsafe {
                simd.store(max_lanes.as_mut_ptr().add(v * S::LANES), state.max[v]);
                simd.store(sum_lanes.as_mut_ptr().add(v * S::LANES), state.sum[v]);
            }
        }
        max.copy_from_slice(&max_lanes[..rows.len()]);
        sum.copy_from_slice(&sum_lanes[..rows.len()]);
        pack::rows(simd, at.out, v_dim, lanes, |lane| {
            // SAFETY: only this call accesses the rows of this head and block.
            (lane < rows.len()).then(|| unsafe { self.out_row(rows.start + lane, head) })
        });
    }

    /// The output row of one query and head.
    ///
    /// # Safety
    /// The row must belong to the head and block of the caller.
    #[inline(always)]
    unsafe fn out_row<'a>(&self, row: usize, head: usize) -> &'a mut [f32] {
        // SAFETY: the row belongs to the caller, by contract.
        unsafe { self.out.row((row * self.q.heads + head) * self.v_dim, self.v_dim) }
    }
}

dispatch!(
    forward_block,
    Forward<'_>,
    block<[8, 3], [4, 3], [4, PORTABLE_COLUMNS]>(task: BlockTask, scratch: &mut [f32]),
    "Calls [`Forward::block`] compiled for the instruction set of `features`."
);
