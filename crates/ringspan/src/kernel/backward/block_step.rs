//! One block of queries and one block of keys: the five products, and the operations between them.

use super::super::KEY_BLOCK;
use super::super::buffer::LINE;
use super::super::micro::{accumulate, multiply};
use super::super::plan::TilePart;
use super::super::terms::{Bounds, ScoreTerms, TermSums};
use super::super::vector::{Simd, exp, prefetch_far};
use super::super::view::Data;
use super::super::visible::VisibleKeys;
use super::buffers::{BufferSizes, KeyBlock, QueryBlock};
use super::{Backward, ROWS};
use std::ops::Range;

/// A block of queries and a block of keys.
pub(super) struct BlockStep<'a> {
    pub(super) head: usize,
    pub(super) block: usize,
    pub(super) part: &'a TilePart,
    /// First row of the block of keys.
    pub(super) base: usize,
    /// Range of rows in the block of keys, in multiples of R.
    pub(super) keys: Range<usize>,
    /// Whether any of the operands is not finite.
    pub(super) has_non_finite: bool,
    /// The buffer of the next block of queries, for prefetching: blocks come from the L3 cache, and their rows are too far
    /// apart for the hardware prefetcher.
    pub(super) next: &'a [f32],
}

impl Backward<'_> {
    /// Adds the contribution of a pair of blocks to all gradients.
    ///
    /// # Safety
    /// `queries` and `at` are packed blocks of `sizes`, which are for S, R and N.
    #[inline(always)]
    pub(super) unsafe fn step<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        sizes: BufferSizes,
        step: &BlockStep,
        queries: &mut QueryBlock,
        at: &mut KeyBlock,
    ) {
        let BlockStep { block, part, .. } = *step;
        let (lanes, keys, first) = (N * S::LANES, step.keys.len(), step.base + step.keys.start);
        let border = part.hides_some(first..first + keys);
        // If operands may be NaN, multiplying by a weight of 0 is not enough to hide them from lanes or keys that do not
        // see them.
        let mask_products = step.has_non_finite && (border || self.plan.rows(block).len() < lanes);
        let mut visible = VisibleKeys::<N>::all(keys);
        if border || mask_products {
            visible.find_bounds(self.plan, block, part, first, keys, lanes);
        }
        // At the border only vectors that see keys are computed, unless a later pass reads all pairs.
        if border && !mask_products && self.terms.is_none() {
            visible.skip_hidden(S::LANES, R);
        }
        // SAFETY: the contract of the caller, which is that of each of these.
        unsafe {
            self.multiply_common::<S, R, N>(simd, sizes, step, &visible, queries, at);
            self.multiply_border::<S, R, N>(simd, sizes, step, &visible, queries, at);
            if let Some(terms) = self.terms {
                let bounds = (border || mask_products).then_some(&visible.bounds);
                self.apply_terms::<S, N>(simd, terms, step, bounds, queries, at);
            }
            if mask_products {
                return self.add_seen(simd, sizes, step, &visible.bounds, queries, at);
            }
            if S::PAIR > 1 {
                self.round::<S, N>(simd, sizes, step.keys.clone(), at);
            }
            self.add_key_gradients::<S, R, N>(simd, sizes, step, &visible, queries, at);
            self.add_query_gradients::<S, N>(simd, sizes, step, &visible, queries, at);
        }
    }

    /// Computes S^T and dP^T of the keys that are computed for all queries, and from them P^T and dS^T, or leaves the
    /// products in their places if there are score terms.
    ///
    /// # Safety
    /// As for [`step`](Self::step).
    #[inline(always)]
    unsafe fn multiply_common<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        sizes: BufferSizes,
        step: &BlockStep,
        visible: &VisibleKeys<N>,
        queries: &QueryBlock,
        at: &mut KeyBlock,
    ) {
        let BlockStep { part, base, .. } = *step;
        let (lanes, keys, common) = (N * S::LANES, &step.keys, &visible.common);
        let (low, high) = &visible.bounds;
        let factor = simd.splat(self.scaling.products);
        let zero = [[simd.splat(0.0); N]; R];
        // Prefetches are spread over the products, because a processor can only wait for a few cache lines at a time.
        let lines = (step.next.len() * R).div_ceil(2 * KEY_BLOCK * LINE).max(1);
        let mut next = step.next.chunks(lines * LINE);
        for row in (keys.start + common.start..keys.start + common.end).step_by(R) {
            next.next().into_iter().for_each(prefetch_far);
            // SAFETY: panels are [D or Dv][R], Q^T and dO^T [D or Dv][lanes], p and ds [KEY_BLOCK][lanes], statistics
            // [3][lanes]; low and high have 64 lanes.
            unsafe {
                let (p, ds) = (at.p.as_mut_ptr().add(row * lanes), at.ds.as_mut_ptr().add(row * lanes));
                let panel = at.k_panels.as_ptr().add(row * sizes.depth);
                let mut s = multiply::<S, R, N>(simd, sizes.depth, panel, 1, R, queries.q_t.as_ptr(), lanes, zero);
                let panel = at.v_panels.as_ptr().add(row * sizes.v_depth);
                let d_out_t = queries.d_out_t.as_ptr();
                if self.terms.is_some() {
                    store(simd, p, &s);
                    store(simd, ds, &multiply::<S, R, N>(simd, sizes.v_depth, panel, 1, R, d_out_t, lanes, zero));
                    continue;
                }
                if base + row < part.all.start || base + row + R > part.all.end {
                    for (i, s) in s.iter_mut().enumerate() {
                        let index = simd.splat((row - keys.start + i) as f32);
                        for (v, s) in s.iter_mut().enumerate() {
                            let at = v * S::LANES;
                            let (low, high) = (simd.load(low.as_ptr().add(at)), simd.load(high.as_ptr().add(at)));
                            *s = simd.within(*s, index, low, high, simd.splat(f32::NEG_INFINITY));
                        }
                    }
                }
                for v in 0..N {
                    let max = simd.load(queries.statistics.as_ptr().add(v * S::LANES));
                    let inverse_sum = simd.load(queries.statistics.as_ptr().add(lanes + v * S::LANES));
                    for (i, s) in s.iter().enumerate() {
                        let s = simd.mul(s[v], factor);
                        let weight = simd.mul(exp(simd, simd.sub(s, max)), inverse_sum);
                        simd.store(p.add(i * lanes + v * S::LANES), weight);
                    }
                }
                next.next().into_iter().for_each(prefetch_far);
                let dp = multiply::<S, R, N>(simd, sizes.v_depth, panel, 1, R, d_out_t, lanes, zero);
                for v in 0..N {
                    let delta = simd.load(queries.statistics.as_ptr().add(2 * lanes + v * S::LANES));
                    for (i, dp) in dp.iter().enumerate() {
                        let p = simd.load(p.add(i * lanes + v * S::LANES));
                        simd.store(ds.add(i * lanes + v * S::LANES), simd.mul(p, simd.sub(dp[v], delta)));
                    }
                }
            }
        }
    }

    /// Computes P^T and dS^T, masked, of the keys at the border that only some vectors of queries see.
    ///
    /// # Safety
    /// As for [`step`](Self::step).
    #[inline(always)]
    unsafe fn multiply_border<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        sizes: BufferSizes,
        step: &BlockStep,
        visible: &VisibleKeys<N>,
        queries: &QueryBlock,
        at: &mut KeyBlock,
    ) {
        let (lanes, keys, factor) = (N * S::LANES, &step.keys, simd.splat(self.scaling.products));
        let VisibleKeys { bounds: (low, high), spans, common } = visible;
        for row in (0..common.start).chain(common.end..keys.len()).step_by(R) {
            for v in (0..N).filter(|&v| spans[v].contains(&row)) {
                let (lane, key) = (v * S::LANES, keys.start + row);
                // SAFETY: panels are [D or Dv][R], Q^T and dO^T [D or Dv][lanes], p and ds [KEY_BLOCK][lanes], statistics
                // [3][lanes]; low and high have 64 lanes; all for one vector of the lanes.
                unsafe {
                    let (k, v) =
                        (at.k_panels.as_ptr().add(key * sizes.depth), at.v_panels.as_ptr().add(key * sizes.v_depth));
                    let (q_t, d_out_t) = (queries.q_t.as_ptr().add(lane), queries.d_out_t.as_ptr().add(lane));
                    let zero = [[simd.splat(0.0)]; R];
                    let s = multiply::<S, R, 1>(simd, sizes.depth, k, 1, R, q_t, lanes, zero);
                    let dp = multiply::<S, R, 1>(simd, sizes.v_depth, v, 1, R, d_out_t, lanes, zero);
                    let (low, high) = (simd.load(low.as_ptr().add(lane)), simd.load(high.as_ptr().add(lane)));
                    let max = simd.load(queries.statistics.as_ptr().add(lane));
                    let inverse_sum = simd.load(queries.statistics.as_ptr().add(lanes + lane));
                    let delta = simd.load(queries.statistics.as_ptr().add(2 * lanes + lane));
                    for (i, ([s], [dp])) in s.into_iter().zip(dp).enumerate() {
                        let hidden = simd.splat(f32::NEG_INFINITY);
                        let s = simd.within(simd.mul(s, factor), simd.splat((row + i) as f32), low, high, hidden);
                        let p = simd.mul(exp(simd, simd.sub(s, max)), inverse_sum);
                        let to = (key + i) * lanes + lane;
                        simd.store(at.p.as_mut_ptr().add(to), p);
                        simd.store(at.ds.as_mut_ptr().add(to), simd.mul(p, simd.sub(dp, delta)));
                    }
                }
            }
        }
    }

    /// Adds P^T dO to dV and dS^T Q to dK. Consecutive keys that the same vectors of queries see are one product.
    ///
    /// # Safety
    /// As for [`step`](Self::step); P^T and dS^T are computed, and rounded if products take pairs.
    #[inline(always)]
    unsafe fn add_key_gradients<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        sizes: BufferSizes,
        step: &BlockStep,
        visible: &VisibleKeys<N>,
        queries: &QueryBlock,
        at: &mut KeyBlock,
    ) {
        let (wide, v_wide, keys) = (sizes.wide, sizes.v_wide, &step.keys);
        let (p, ds, row) = match S::PAIR {
            1 => (at.p.as_ptr(), at.ds.as_ptr(), N * S::LANES),
            _ => (at.p_halves.as_ptr(), at.ds_halves.as_ptr(), sizes.half_row),
        };
        let mut key = 0;
        while key < keys.len() {
            let vectors = visible.vectors_seeing(key);
            let end = (key..keys.len()).step_by(R).find(|&next| visible.vectors_seeing(next) != vectors);
            let end = end.unwrap_or(keys.len());
            let (from, depth) = (vectors.start * S::LANES / S::PAIR, vectors.len() * S::LANES / S::PAIR);
            // SAFETY: P^T and dS^T are [KEY_BLOCK][lanes], Q and dK [..][wide], dO and dV [..][v_wide], or pairs of them;
            // the rows `keys` are within KEY_BLOCK and a multiple of R, which is one of ROWS.
            unsafe {
                let to = keys.start + key;
                let (p, ds) = (p.add(to * row + from), ds.add(to * row + from));
                let (q, d_out) = (queries.q.as_ptr().add(from * wide), queries.d_out.as_ptr().add(from * v_wide));
                let (dk, dv) = (at.dk.as_mut_ptr().add(to * wide), at.dv.as_mut_ptr().add(to * v_wide));
                accumulate::<S, ROWS>(simd, (end - key, depth, v_wide), p, row, 1, d_out, dv);
                accumulate::<S, ROWS>(simd, (end - key, depth, wide), ds, row, 1, q, dk);
            }
            key = end;
        }
    }

    /// Adds dS K to dQ, for all vectors of queries at once if they see the same keys.
    ///
    /// # Safety
    /// As for [`add_key_gradients`](Self::add_key_gradients).
    #[inline(always)]
    unsafe fn add_query_gradients<S: Simd, const N: usize>(
        &self,
        simd: S,
        sizes: BufferSizes,
        step: &BlockStep,
        visible: &VisibleKeys<N>,
        queries: &mut QueryBlock,
        at: &KeyBlock,
    ) {
        let (lanes, wide, keys) = (N * S::LANES, sizes.wide, &step.keys);
        let ds = if S::PAIR == 1 { at.ds.as_ptr() } else { at.ds_pairs.as_ptr() };
        let step = if visible.common == (0..keys.len()) { N } else { 1 };
        for v in (0..N).step_by(step) {
            let (span, lane) = (&visible.spans[v], v * S::LANES);
            // SAFETY: dS^T is [KEY_BLOCK][lanes], K and dQ [..][wide], or pairs of them; LANES is a multiple of ROWS.
            unsafe {
                let from = (keys.start + span.start) / S::PAIR;
                let (ds, k) = (ds.add(from * lanes + lane), at.k.as_ptr().add(from * wide));
                let dq = queries.dq.as_mut_ptr().add(lane * wide);
                accumulate::<S, ROWS>(simd, (step * S::LANES, span.len() / S::PAIR, wide), ds, 1, lanes, k, dq);
            }
        }
    }

    /// Turns products into P^T and dS^T with all score terms, and adds the gradients of these terms.
    ///
    /// # Safety
    /// As for [`step`](Self::step); P^T and dS^T hold the products.
    #[inline(always)]
    unsafe fn apply_terms<S: Simd, const N: usize>(
        &self,
        simd: S,
        terms: &ScoreTerms,
        step: &BlockStep,
        bounds: Option<&Bounds>,
        queries: &QueryBlock,
        at: &mut KeyBlock,
    ) {
        let (lanes, keys, head) = (N * S::LANES, step.keys.clone(), step.head);
        let block_pair = self.plan.block_pair(step.block, step.part, step.base + keys.start);
        let block_terms = terms.prepare(simd, block_pair, head, keys.len(), lanes, at.bias);
        let (max, rest) = queries.statistics.split_at(lanes);
        let (inverse_sum, delta) = rest.split_at(lanes);
        let mut sums = TermSums { table: at.table, max, inverse_sum, delta };
        let (p, ds) = (&mut at.p[keys.start * lanes..], &mut at.ds[keys.start * lanes..]);
        // SAFETY: all are [keys][lanes], the statistics of all lanes.
        unsafe {
            terms.gradients::<S, N>(
                simd,
                self.scaling.products,
                &block_terms,
                p.as_mut_ptr(),
                ds.as_mut_ptr(),
                at.bias,
                bounds,
                &mut sums,
            )
        };
        let Some(bias) = &self.bias else { return };
        for (lane, row) in (0..lanes).filter_map(|lane| Some((lane, block_terms.row(lane)?))) {
            let row = row * bias.heads + head.min(bias.heads - 1);
            // SAFETY: no other worker has this row of this head, or, if heads share it, of any head.
            let row = unsafe { self.d_bias.row(row * bias.dim, bias.dim) };
            ScoreTerms::add_bias(&block_terms, lanes, at.bias, lane, row);
        }
    }

    /// Rounds P^T, and dS^T times the scale, to bf16 pairs: along the lanes, and dS^T also along the keys.
    ///
    /// # Safety
    /// As for [`step`](Self::step).
    #[inline(always)]
    unsafe fn round<S: Simd, const N: usize>(
        &self,
        simd: S,
        sizes: BufferSizes,
        keys: Range<usize>,
        at: &mut KeyBlock,
    ) {
        let (lanes, half_row, scale) = (N * S::LANES, sizes.half_row, simd.splat(self.scale));
        let zero = simd.splat(0.0);
        for row in keys.step_by(2) {
            let (mut p, mut ds) = ([[zero; N]; 2], [[zero; N]; 2]);
            // SAFETY: P^T and dS^T are [KEY_BLOCK][lanes], their halves [KEY_BLOCK][half_row] with room for all lanes,
            // the pairs [KEY_BLOCK / 2][lanes]; the keys are whole pairs.
            unsafe {
                for i in 0..2 {
                    for v in 0..N {
                        let from = (row + i) * lanes + v * S::LANES;
                        p[i][v] = simd.load(at.p.as_ptr().add(from));
                        ds[i][v] = simd.mul(scale, simd.load(at.ds.as_ptr().add(from)));
                    }
                    for v in (0..N).step_by(2) {
                        let to = (row + i) * half_row + v / 2 * S::LANES;
                        let second = |x: &[S::V; N]| if v + 1 < N { x[v + 1] } else { zero };
                        simd.store(at.p_halves.as_mut_ptr().add(to), simd.pair_along(p[i][v], second(&p[i])));
                        simd.store(at.ds_halves.as_mut_ptr().add(to), simd.pair_along(ds[i][v], second(&ds[i])));
                    }
                }
                for (v, (first, second)) in ds[0].iter().zip(&ds[1]).enumerate() {
                    let to = at.ds_pairs.as_mut_ptr().add(row / 2 * lanes + v * S::LANES);
                    simd.store(to, simd.pair(*first, *second));
                }
            }
        }
    }

    /// Adds the three products over visible pairs only, using P^T and dS^T and the unpacked tensors.
    #[inline(always)]
    fn add_seen<S: Simd>(
        &self,
        _simd: S,
        sizes: BufferSizes,
        step: &BlockStep,
        (low, high): &Bounds,
        queries: &mut QueryBlock,
        at: &mut KeyBlock,
    ) {
        let (first, kv) = (self.plan.rows(step.block).start, self.heads.kv_of(step.head));
        for key in step.keys.clone() {
            let index = (key - step.keys.start) as f32;
            for lane in (0..sizes.lanes).filter(|&lane| low[lane] <= index && index < high[lane]) {
                let (p, ds) = (at.p[key * sizes.lanes + lane], at.ds[key * sizes.lanes + lane] * self.scale);
                add_product(&mut at.dv[key * sizes.v_wide..], p, self.d_out.at(first + lane, step.head));
                add_product(&mut at.dk[key * sizes.wide..], ds, self.q.at(first + lane, step.head));
                add_product(&mut queries.dq[lane * sizes.wide..], ds, self.k.at(step.base + key, kv));
            }
        }
    }
}

/// `to += factor * from`
#[inline(always)]
fn add_product(to: &mut [f32], factor: f32, from: Data) {
    match from {
        Data::F32(from) => to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from),
        _ => to.iter_mut().zip(&*from.to_f32()).for_each(|(to, from)| *to += factor * from),
    }
}

/// Stores R rows of N vectors one after the other.
///
/// # Safety
/// `to` must be writable for all of them.
#[inline(always)]
unsafe fn store<S: Simd, const R: usize, const N: usize>(simd: S, to: *mut f32, rows: &[[S::V; N]; R]) {
    for (at, x) in rows.iter().flatten().enumerate() {
        // SAFETY: the contract of the caller.
        unsafe { simd.store(to.add(at * S::LANES), *x) };
    }
}
