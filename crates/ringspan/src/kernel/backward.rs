//! The backward pass: five products per block of keys and block of queries, scores recomputed from the log-sum-exp.
//!
//! S^T and dP^T have queries in the lanes; dV += P^T dO, dK += dS^T Q and dQ += dS K have the head width in the lanes.
//! P^T and dS^T are then only broadcast, so nothing is transposed in the loop. Source: Dao, 2023 (arXiv:2307.08691),
//! algorithm 2, with keys in the outer loop.

use super::buffer::{Target, lines};
use super::micro::{accumulate, multiply};
use super::pack::{copy, panels, transpose};
use super::plan::{Part, Plan};
use super::vector::Simd;
use super::{HeadMap, KEY_BLOCK, View};
use std::ops::Range;

/// Rows of the micro kernel whose lanes run along the head width.
const ROWS: usize = 4;

/// What all workers of a call share.
pub(super) struct Backward<'a> {
    pub(super) q: View<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    pub(super) d_out: View<'a>,
    /// `[H, Tq]`
    pub(super) lse: &'a [f32],
    /// `[H, Tq]`
    pub(super) delta: &'a [f32],
    pub(super) heads: &'a HeadMap,
    pub(super) plan: &'a Plan<'a>,
    pub(super) scale: f32,
    /// `[Tq, H, D]`
    pub(super) dq: Target,
}

/// Where a worker adds the gradients of one key-value head's keys and values.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    pub(super) dk: Target,
    pub(super) dv: Target,
    /// Elements from one row to the next, for dk and dv.
    pub(super) strides: (usize, usize),
    /// Elements before the head in its row, for dk and dv.
    pub(super) offsets: (usize, usize),
}

/// Sizes of a worker's buffers in elements, all in whole cache lines.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    lanes: usize,
    /// D and Dv filled up to whole vectors.
    wide: usize,
    v_wide: usize,
    /// Of one block of queries: Q^T, dO^T, Q, dO, dQ, statistics.
    q_t: usize,
    d_out_t: usize,
    q: usize,
    d_out: usize,
    statistics: usize,
    /// Of one block of keys: K and V in panels, K, dK, dV, P^T and dS^T.
    k_panels: usize,
    v_panels: usize,
    k: usize,
    dv: usize,
    p: usize,
}

impl Sizes {
    pub(super) fn new(dim: usize, v_dim: usize, lanes: usize, vector: usize) -> Self {
        let (wide, v_wide) = (dim.next_multiple_of(vector), v_dim.next_multiple_of(vector));
        Self {
            lanes,
            wide,
            v_wide,
            q_t: lines(lanes * dim),
            d_out_t: lines(lanes * v_dim),
            q: lines(lanes * wide),
            d_out: lines(lanes * v_wide),
            statistics: lines(2 * lanes),
            k_panels: lines(KEY_BLOCK * dim),
            v_panels: lines(KEY_BLOCK * v_dim),
            k: lines(KEY_BLOCK * wide),
            dv: lines(KEY_BLOCK * v_wide),
            p: lines(KEY_BLOCK * lanes),
        }
    }

    /// Elements kept of a block of queries.
    fn block(self) -> usize {
        self.q_t + self.d_out_t + 2 * self.q + self.d_out + self.statistics
    }

    /// Elements a worker needs for `blocks` blocks of queries at a time.
    pub(super) fn scratch(self, blocks: usize) -> usize {
        blocks * self.block() + self.k_panels + self.v_panels + 2 * self.k + self.dv + 2 * self.p
    }
}

/// One block of keys of a worker.
struct KeyBlock<'s> {
    k_panels: &'s mut [f32],
    v_panels: &'s mut [f32],
    k: &'s mut [f32],
    dk: &'s mut [f32],
    dv: &'s mut [f32],
    p: &'s mut [f32],
    ds: &'s mut [f32],
}

impl Backward<'_> {
    /// Adds what `blocks` of one query head contribute to dq, and to the keys' and values' gradients in `sums`.
    ///
    /// # Safety
    /// No two calls at once may name the same head and block, or the same rows of `sums`. `scratch` must have at least
    /// the size that `Sizes::scratch` tells.
    #[inline(always)]
    pub(super) unsafe fn head<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        head: usize,
        blocks: Range<usize>,
        sums: Sums,
        scratch: &mut [f32],
    ) {
        let sizes = Sizes::new(self.q.dim, self.v.dim, N * S::LANES, S::LANES);
        let (queries, rest) = scratch.split_at_mut(blocks.len() * sizes.block());
        for (buffer, block) in queries.chunks_exact_mut(sizes.block()).zip(blocks.clone()) {
            self.pack_queries::<R>(sizes, head, block, buffer);
        }
        let (k_panels, rest) = rest.split_at_mut(sizes.k_panels);
        let (v_panels, rest) = rest.split_at_mut(sizes.v_panels);
        let (k, rest) = rest.split_at_mut(sizes.k);
        let (dk, rest) = rest.split_at_mut(sizes.k);
        let (dv, rest) = rest.split_at_mut(sizes.dv);
        let (p, rest) = rest.split_at_mut(sizes.p);
        let ds = &mut rest[..sizes.p];
        let mut keys = KeyBlock { k_panels, v_panels, k, dk, dv, p, ds };

        let kv = self.heads.kv_of(head);
        let visible = &self.plan.keys;
        for base in (visible.start / R * R..visible.end).step_by(KEY_BLOCK) {
            let rows = base..(base + KEY_BLOCK).min(visible.end);
            let mut packed = false;
            for (buffer, block) in queries.chunks_exact_mut(sizes.block()).zip(blocks.clone()) {
                for part in self.plan.parts(block) {
                    let (from, to) = (part.any.start.max(rows.start), part.any.end.min(rows.end));
                    if from >= to {
                        continue;
                    }
                    if !packed {
                        self.pack_keys::<R>(sizes, kv, &rows, &mut keys);
                        packed = true;
                    }
                    let panels = (from - base) / R * R..(to - base).next_multiple_of(R);
                    // SAFETY: the buffers have these sizes; the panels lie within KEY_BLOCK.
                    unsafe { self.pair::<S, R, N>(simd, sizes, block, part, base, panels, buffer, &mut keys) };
                }
            }
            if packed {
                for (i, row) in rows.enumerate() {
                    // SAFETY: this head's rows are this worker's.
                    let (dk, dv) = unsafe {
                        (
                            sums.dk.row(row * sums.strides.0 + sums.offsets.0, self.k.dim),
                            sums.dv.row(row * sums.strides.1 + sums.offsets.1, self.v.dim),
                        )
                    };
                    add(dk, &keys.dk[i * sizes.wide..]);
                    add(dv, &keys.dv[i * sizes.v_wide..]);
                }
            }
        }
        for (buffer, block) in queries.chunks_exact(sizes.block()).zip(blocks) {
            let dq = &buffer[sizes.q_t + sizes.d_out_t + sizes.q + sizes.d_out..];
            for (i, row) in self.plan.rows(block).enumerate() {
                // SAFETY: this head's rows of this block are this worker's.
                let to = unsafe { self.dq.row((row * self.q.heads + head) * self.q.dim, self.q.dim) };
                add(to, &dq[i * sizes.wide..]);
            }
        }
    }

    /// Q^T, dO^T, Q, dO, a zero dQ, and per lane lse * log2(e) and delta.
    #[inline(always)]
    fn pack_queries<const R: usize>(&self, sizes: Sizes, head: usize, block: usize, buffer: &mut [f32]) {
        let rows = self.plan.rows(block);
        let row = |lane: usize| {
            let row = rows.start + lane;
            (lane < rows.len() && self.plan.sees_anything(row)).then_some(row)
        };
        let (q_row, d_row) = (|lane| Some(self.q.row(row(lane)?, head)), |lane| Some(self.d_out.row(row(lane)?, head)));
        let (q_t, rest) = buffer.split_at_mut(sizes.q_t);
        let (d_out_t, rest) = rest.split_at_mut(sizes.d_out_t);
        let (q, rest) = rest.split_at_mut(sizes.q);
        let (d_out, rest) = rest.split_at_mut(sizes.d_out);
        let (dq, statistics) = rest.split_at_mut(sizes.q);
        transpose::<R>(q_t, self.q.dim, sizes.lanes, self.scale * std::f32::consts::LOG2_E, q_row);
        transpose::<R>(d_out_t, self.v.dim, sizes.lanes, 1.0, d_row);
        copy(&mut q[..sizes.lanes * sizes.wide], sizes.wide, self.scale, q_row);
        copy(&mut d_out[..sizes.lanes * sizes.v_wide], sizes.v_wide, 1.0, d_row);
        dq.fill(0.0);
        for lane in 0..sizes.lanes {
            // A query that sees nothing is measured against +inf: all its probabilities are exactly 0.
            let at = row(lane).map(|row| head * self.q.tokens + row).filter(|&at| self.lse[at] != f32::NEG_INFINITY);
            statistics[lane] = at.map_or(f32::INFINITY, |at| self.lse[at] * std::f32::consts::LOG2_E);
            statistics[sizes.lanes + lane] = at.map_or(0.0, |at| self.delta[at]);
        }
    }

    /// K and V in panels, K in rows, zero dK and dV.
    #[inline(always)]
    fn pack_keys<const R: usize>(&self, sizes: Sizes, kv: usize, rows: &Range<usize>, keys: &mut KeyBlock) {
        let row = |i: usize| {
            let row = rows.start + i;
            (row < rows.end && self.plan.sees_key(row)).then_some(row)
        };
        let count = rows.len().next_multiple_of(R);
        panels::<R>(keys.k_panels, self.k.dim, count, |i| Some(self.k.row(row(i)?, kv)));
        panels::<R>(keys.v_panels, self.v.dim, count, |i| Some(self.v.row(row(i)?, kv)));
        copy(&mut keys.k[..count * sizes.wide], sizes.wide, self.scale, |i| Some(self.k.row(row(i)?, kv)));
        keys.dk.fill(0.0);
        keys.dv.fill(0.0);
    }

    /// One block of queries against the rows `keys` of one block of keys (counted from `base`, multiples of R).
    ///
    /// # Safety
    /// `buffer` holds a packed block of queries, `at` a packed block of keys, both of `sizes` made for S, R and N.
    #[allow(clippy::too_many_arguments)] // The registers of a loop body, cut out to be readable.
    #[inline(always)]
    unsafe fn pair<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        sizes: Sizes,
        block: usize,
        part: &Part,
        base: usize,
        keys: Range<usize>,
        buffer: &mut [f32],
        at: &mut KeyBlock,
    ) {
        let lanes = N * S::LANES;
        let (q_t, rest) = buffer.split_at_mut(sizes.q_t);
        let (d_out_t, rest) = rest.split_at_mut(sizes.d_out_t);
        let (q, rest) = rest.split_at_mut(sizes.q);
        let (d_out, rest) = rest.split_at_mut(sizes.d_out);
        let (dq, statistics) = rest.split_at_mut(sizes.q);
        let (mut low, mut high) = ([0.0; 64], [0.0; 64]);
        if part.all.start > base + keys.start || part.all.end < base + keys.end {
            self.plan.bounds(block, part, base, KEY_BLOCK, &mut low[..lanes], &mut high[..lanes]);
        }
        let zero = [[simd.splat(0.0); N]; R];
        for row in keys.clone().step_by(R) {
            // SAFETY: panels are [D or Dv][R], Q^T and dO^T [D or Dv][lanes], p and ds [KEY_BLOCK][lanes], statistics
            // [2][lanes]; low and high have 64 lanes.
            unsafe {
                let (p, ds) = (at.p.as_mut_ptr().add(row * lanes), at.ds.as_mut_ptr().add(row * lanes));
                let panel = at.k_panels.as_ptr().add(row * self.k.dim);
                let mut s = multiply::<S, R, N>(simd, self.k.dim, panel, 1, R, q_t.as_ptr(), lanes, zero);
                if base + row < part.all.start || base + row + R > part.all.end {
                    for (i, s) in s.iter_mut().enumerate() {
                        let index = simd.splat((row + i) as f32);
                        for (v, s) in s.iter_mut().enumerate() {
                            let at = v * S::LANES;
                            let (low, high) = (simd.load(low.as_ptr().add(at)), simd.load(high.as_ptr().add(at)));
                            *s = simd.within(*s, index, low, high);
                        }
                    }
                }
                for v in 0..N {
                    let lse = simd.load(statistics.as_ptr().add(v * S::LANES));
                    for (i, s) in s.iter().enumerate() {
                        simd.store(p.add(i * lanes + v * S::LANES), simd.exp2(simd.sub(s[v], lse)));
                    }
                }
                let panel = at.v_panels.as_ptr().add(row * self.v.dim);
                let dp = multiply::<S, R, N>(simd, self.v.dim, panel, 1, R, d_out_t.as_ptr(), lanes, zero);
                for v in 0..N {
                    let delta = simd.load(statistics.as_ptr().add(lanes + v * S::LANES));
                    for (i, dp) in dp.iter().enumerate() {
                        let p = simd.load(p.add(i * lanes + v * S::LANES));
                        simd.store(ds.add(i * lanes + v * S::LANES), simd.mul(p, simd.sub(dp[v], delta)));
                    }
                }
            }
        }
        let count = keys.len();
        // SAFETY: P^T and dS^T are [KEY_BLOCK][lanes], Q, dQ, K, dK [..][wide], dO and dV [..][v_wide]; the rows `keys`
        // are within KEY_BLOCK and a multiple of R; lanes and R are multiples of ROWS.
        unsafe {
            let (p, ds) = (at.p.as_ptr().add(keys.start * lanes), at.ds.as_ptr().add(keys.start * lanes));
            let dv = at.dv.as_mut_ptr().add(keys.start * sizes.v_wide);
            accumulate::<S, ROWS>(simd, (count, lanes, sizes.v_wide), p, lanes, 1, d_out.as_ptr(), dv);
            let dk = at.dk.as_mut_ptr().add(keys.start * sizes.wide);
            accumulate::<S, ROWS>(simd, (count, lanes, sizes.wide), ds, lanes, 1, q.as_ptr(), dk);
            let k = at.k.as_ptr().add(keys.start * sizes.wide);
            accumulate::<S, ROWS>(simd, (lanes, count, sizes.wide), ds, 1, lanes, k, dq.as_mut_ptr());
        }
    }
}

#[inline(always)]
fn add(to: &mut [f32], from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += from;
    }
}
