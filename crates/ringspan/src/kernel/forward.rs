//! The forward pass over one block of queries: an online softmax with the queries in the lanes.
//!
//! Scores are stored as S^T `[key][query]`, so row maxima, row sums, rescaling and masks are operations on whole vectors,
//! without reductions across lanes. Sources: Dao, 2023 (arXiv:2307.08691); Goto and van de Geijn, 2008, for the packing.

use super::buffer::{Target, lines};
use super::isa::Code;
use super::micro::{multiply, multiply_seen};
use super::pack::{self, Keys};
use super::plan::{self, Plan, TilePart};
use super::terms::{self, Scaling, ScoreTerms};
use super::vector::{Simd, exp};
use super::view::Data;
use super::{HeadMap, KEY_BLOCK, View};
use std::ops::Range;

/// The tensors and parameters that all blocks of a call share.
pub(super) struct Forward<'a> {
    pub(super) q: View<'a>,
    pub(super) heads: &'a HeadMap,
    pub(super) plan: &'a Plan<'a>,
    pub(super) keys: &'a Keys,
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
pub(super) fn scratch(dim: usize, v_dim: usize, code: Code, bias: bool) -> usize {
    let (lanes, bias) = (code.lanes(), ScoreTerms::scratch(bias, code.lanes()));
    let out = lines(lanes * v_dim.next_multiple_of(code.rows()));
    lines(lanes * dim.div_ceil(code.pair())) + out + lines(lanes * KEY_BLOCK) + bias
}

/// The softmax state of one block, with the queries in the lanes.
struct BlockState<V, const N: usize> {
    max: [V; N],
    sum: [V; N],
}

impl Forward<'_> {
    /// Adds the plan's keys to the state of one head and block, computing R keys by at most N vectors of queries at a time.
    ///
    /// # Safety
    /// No two concurrent calls may have the same head and block. The keys and values of the head must have been packed, and
    /// `scratch` have the size of [`scratch`].
    #[inline(always)]
    pub(super) unsafe fn block<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        head: usize,
        block: usize,
        scratch: &mut [f32],
    ) {
        // The last block may have fewer queries.
        let vectors = self.plan.rows(block).len().div_ceil(S::LANES);
        // SAFETY: the contract of the caller.
        unsafe {
            match vectors {
                1 => self.vectors::<S, R, 1>(simd, head, block, scratch),
                2 => self.vectors::<S, R, 2>(simd, head, block, scratch),
                _ => self.vectors::<S, R, N>(simd, head, block, scratch),
            }
        }
    }

    /// Computes a [`block`](Self::block) whose queries fill N vectors.
    ///
    /// # Safety
    /// As for `block`.
    #[inline(always)]
    unsafe fn vectors<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        head: usize,
        block: usize,
        scratch: &mut [f32],
    ) {
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

        for part in self.plan.parts(block) {
            let first = (part.any.start - self.keys.base) / R * R;
            let end = (part.any.end - self.keys.base).next_multiple_of(R);
            for from in (first..end).step_by(KEY_BLOCK) {
                let keys = from..end.min(from + KEY_BLOCK);
                // SAFETY: q, out, p and bias have the sizes for these lanes and at most KEY_BLOCK keys.
                unsafe { self.key_block::<S, R, N>(simd, head, block, part, keys, q, out, p, bias, &mut state) };
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
        pack::rows(simd, out, v_dim, lanes, |lane| {
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
        unsafe { self.out.row((row * self.heads.heads() + head) * self.v_dim, self.v_dim) }
    }

    /// One step of the online softmax over at most KEY_BLOCK keys; `keys` counts from the first packed row.
    ///
    /// # Safety
    /// `q` is `[D][lanes]`, `out` `[Dv up to R][lanes]`, `p` `[KEY_BLOCK][lanes]`; `keys` are among the packed rows, and
    /// their start and number are multiples of R. `bias` has the size of `ScoreTerms::scratch`.
    #[allow(clippy::too_many_arguments)] // This is a loop body, moved out for readability.
    #[inline(always)]
    unsafe fn key_block<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        head: usize,
        block: usize,
        part: &TilePart,
        keys: Range<usize>,
        q: &[f32],
        out: &mut [f32],
        p: &mut [f32],
        bias: &mut [f32],
        state: &mut BlockState<S::V, N>,
    ) {
        let lanes = N * S::LANES;
        let kv = self.heads.kv_of(head);
        let base = self.keys.base + keys.start;
        let border = part.all.start > base || part.all.end < base + keys.len();
        let (mut low, mut high) = ([0.0; terms::LANES], [0.0; terms::LANES]);
        if border {
            self.plan.bounds(block, part, base, keys.len(), &mut low[..lanes], &mut high[..lanes]);
        }
        // SAFETY: the head has been packed, by contract.
        let panels = unsafe { self.keys.keys(kv, keys.start) };
        let depth = self.q.dim.div_ceil(S::PAIR);
        let mut max = [simd.splat(f32::NEG_INFINITY); N];
        let whole = 0..keys.len();
        let spans: [Range<usize>; N] = match border && self.terms.is_none() {
            true => plan::spans(&low, &high, S::LANES, R),
            false => std::array::from_fn(|_| whole.clone()),
        };
        // These keys are seen by all vectors; keys before and after them are computed for each vector alone.
        let start = spans.iter().map(|span| span.start).max().unwrap_or(0);
        let common = start..spans.iter().map(|span| span.end).min().unwrap_or(0).max(start);
        for row in common.clone().step_by(R) {
            let zero = [[simd.splat(0.0); N]; R];
            // SAFETY: the panel is [D][R], q is [D][lanes]; low and high have 64 lanes; p has KEY_BLOCK rows.
            unsafe {
                let panel = panels.as_ptr().add(row * depth);
                let mut s = multiply::<S, R, N>(simd, depth, panel, 1, R, q.as_ptr(), lanes, zero);
                if border && self.terms.is_none() && (base + row < part.all.start || base + row + R > part.all.end) {
                    for (i, s) in s.iter_mut().enumerate() {
                        let (index, hidden) = (simd.splat((row + i) as f32), simd.splat(f32::NEG_INFINITY));
                        for (v, s) in s.iter_mut().enumerate() {
                            let at = v * S::LANES;
                            let (low, high) = (simd.load(low.as_ptr().add(at)), simd.load(high.as_ptr().add(at)));
                            *s = simd.within(*s, index, low, high, hidden);
                        }
                    }
                }
                for (i, s) in s.iter().enumerate() {
                    for v in 0..N {
                        max[v] = simd.max(max[v], s[v]);
                        simd.store(p.as_mut_ptr().add((row + i) * lanes + v * S::LANES), s[v]);
                    }
                }
            }
        }
        for row in (0..common.start).chain(common.end..keys.len()).step_by(R) {
            for v in 0..N {
                let hidden = simd.splat(f32::NEG_INFINITY);
                let mut s = [[hidden]; R];
                // SAFETY: as above.
                unsafe {
                    if spans[v].contains(&row) {
                        let (panel, q) = (panels.as_ptr().add(row * depth), q.as_ptr().add(v * S::LANES));
                        s = multiply::<S, R, 1>(simd, depth, panel, 1, R, q, lanes, [[simd.splat(0.0)]; R]);
                    }
                    let low = simd.load(low.as_ptr().add(v * S::LANES));
                    let high = simd.load(high.as_ptr().add(v * S::LANES));
                    for (i, [s]) in s.into_iter().enumerate() {
                        let s = simd.within(s, simd.splat((row + i) as f32), low, high, hidden);
                        max[v] = simd.max(max[v], s);
                        simd.store(p.as_mut_ptr().add((row + i) * lanes + v * S::LANES), s);
                    }
                }
            }
        }
        let frame = self.terms.map(|terms| {
            let block_pair = self.plan.block_pair(block, part, base);
            let frame = terms.frame(simd, block_pair, head, keys.len(), lanes, bias);
            let bounds = (low, high);
            max = [simd.splat(f32::NEG_INFINITY); N];
            // SAFETY: p and bias are [KEY_BLOCK][lanes].
            unsafe {
                let bounds = border.then_some(&bounds);
                terms.scores::<S, N>(simd, self.scaling.products, &frame, p.as_mut_ptr(), bias, bounds, &mut max);
            }
            (terms, frame)
        });

        // With terms, the buffer holds scores, which are scaled already.
        let factor = simd.splat(if frame.is_none() { self.scaling.products } else { 1.0 });
        if S::PAIR == 1 && frame.is_none() && self.scaling.products != 1.0 {
            for at in (0..keys.len() * N).map(|vector| vector * S::LANES) {
                // SAFETY: p has KEY_BLOCK rows of lanes.
                unsafe { simd.store(p.as_mut_ptr().add(at), simd.mul(simd.load(p.as_ptr().add(at)), factor)) };
            }
        }
        // A lane that has seen nothing keeps the maximum -inf; subtracting a finite number instead avoids NaN.
        let (mut finite, mut alpha) = (max, max);
        for v in 0..N {
            max[v] = simd.max(state.max[v], simd.mul(max[v], factor));
            finite[v] = simd.max(max[v], simd.splat(f32::MIN));
            alpha[v] = exp(simd, simd.sub(state.max[v], finite[v]));
        }
        let mut sum = [simd.splat(0.0); N];
        for row in (0..keys.len()).step_by(S::PAIR) {
            for v in 0..N {
                // SAFETY: p has KEY_BLOCK rows of lanes; keys are whole pairs.
                unsafe {
                    let at = p.as_mut_ptr().add(row * lanes + v * S::LANES);
                    if S::PAIR == 1 {
                        let x = exp(simd, simd.sub(simd.load(at), finite[v]));
                        sum[v] = simd.add(sum[v], x);
                        simd.store(at, x);
                        continue;
                    }
                    // The products are rounded before the maximum, which is one of them, is subtracted: so no weight
                    // exceeds 1.
                    let x = exp(simd, simd.sub(simd.mul(simd.load(at), factor), finite[v]));
                    let y = exp(simd, simd.sub(simd.mul(simd.load(at.add(lanes)), factor), finite[v]));
                    sum[v] = simd.add(sum[v], simd.add(x, y));
                    if frame.is_some() {
                        simd.store(at, x);
                        simd.store(at.add(lanes), y);
                    } else {
                        // This row of pairs has been read already: it is one of the two rows, or before them.
                        simd.store(p.as_mut_ptr().add(row / 2 * lanes + v * S::LANES), simd.pair(x, y));
                    }
                }
            }
        }
        for v in 0..N {
            state.sum[v] = simd.fma(state.sum[v], alpha[v], sum[v]);
        }
        state.max = max;
        if let Some((terms, frame)) = &frame {
            terms.drop(frame, lanes, p);
            if S::PAIR > 1 {
                for at in (0..keys.len() / 2).flat_map(|row| (0..N).map(move |v| row * lanes + v * S::LANES)) {
                    let (row, lane) = (at / lanes, at % lanes);
                    // SAFETY: p has KEY_BLOCK rows of lanes; the row written here has been read, as above.
                    unsafe {
                        let from = p.as_ptr().add(2 * row * lanes + lane);
                        simd.store(p.as_mut_ptr().add(at), simd.pair(simd.load(from), simd.load(from.add(lanes))));
                    }
                }
            }
        }

        let mask_products = border && self.keys.has_non_finite(kv, &keys);
        for column in (0..self.v_dim).step_by(R) {
            // SAFETY: as above.
            let values = unsafe { self.keys.values::<R>(kv, column, keys.start) };
            let depth = keys.len() / S::PAIR;
            // SAFETY: values are [keys][R], p [keys][lanes], either may be pairs, and out has whole panels of R columns.
            unsafe {
                let out = out.as_mut_ptr().add(column * lanes);
                let mut acc = [[simd.splat(0.0); N]; R];
                for (i, acc) in acc.iter_mut().enumerate() {
                    for (v, x) in acc.iter_mut().enumerate() {
                        *x = simd.mul(alpha[v], simd.load(out.add(i * lanes + v * S::LANES)));
                    }
                }
                let (values, p) = (values.as_ptr(), p.as_ptr());
                if mask_products {
                    acc = multiply_seen::<S, R, N>(simd, depth, values, R, p, lanes, (&low, &high), acc);
                } else {
                    // Products are added in the order of the keys, as in the careful way: so queries that see only finite
                    // values keep their bits.
                    for (v, span) in spans.iter().enumerate() {
                        let before = span.start..span.end.min(common.start);
                        multiply_one::<S, R, N>(simd, &before, values, p, lanes, v, &mut acc);
                    }
                    let (first, depth) = (common.start / S::PAIR, common.len() / S::PAIR);
                    acc =
                        multiply::<S, R, N>(simd, depth, values.add(first * R), 1, R, p.add(first * lanes), lanes, acc);
                    for (v, span) in spans.iter().enumerate() {
                        let behind = span.start.max(common.end)..span.end;
                        multiply_one::<S, R, N>(simd, &behind, values, p, lanes, v, &mut acc);
                    }
                }
                for (i, acc) in acc.iter().enumerate() {
                    for (v, x) in acc.iter().enumerate() {
                        simd.store(out.add(i * lanes + v * S::LANES), *x);
                    }
                }
            }
        }
    }
}

/// Adds the products of some keys to vector `v` only.
///
/// # Safety
/// `values` is `[keys][R]` and `p` `[keys][lanes]`, perhaps in pairs; both must contain all keys of the range.
#[inline(always)]
unsafe fn multiply_one<S: Simd, const R: usize, const N: usize>(
    simd: S,
    keys: &Range<usize>,
    values: *const f32,
    p: *const f32,
    lanes: usize,
    v: usize,
    acc: &mut [[S::V; N]; R],
) {
    let (first, depth) = (keys.start / S::PAIR, keys.len() / S::PAIR);
    let mut one = [[simd.splat(0.0)]; R];
    one.iter_mut().zip(&*acc).for_each(|(one, acc)| one[0] = acc[v]);
    // SAFETY: the contract of the caller.
    one = unsafe {
        multiply::<S, R, 1>(simd, depth, values.add(first * R), 1, R, p.add(first * lanes + v * S::LANES), lanes, one)
    };
    acc.iter_mut().zip(one).for_each(|(acc, one)| acc[v] = one[0]);
}
