//! One block of queries and one block of keys: a step of the online softmax, from products to outputs.

use super::super::micro::{multiply, multiply_masked};
use super::super::plan::TilePart;
use super::super::terms::{BlockTerms, ScoreTerms};
use super::super::vector::{Simd, exp};
use super::super::visible::VisibleKeys;
use super::{BlockState, BlockTask, Forward};
use std::ops::Range;

/// A block of queries and a block of keys.
pub(super) struct BlockStep<'a> {
    pub(super) task: BlockTask,
    pub(super) part: &'a TilePart,
    /// Packed rows of the block of keys, at most KEY_BLOCK; their start and number are multiples of R.
    pub(super) keys: Range<usize>,
    /// Row of the first of these keys in the tensor.
    pub(super) base: usize,
    /// Whether some query does not see some of these keys.
    pub(super) border: bool,
}

/// The buffers of one block of queries.
pub(super) struct Buffers<'s> {
    /// Q^T, `[D][lanes]`.
    pub(super) q: &'s [f32],
    /// O^T, `[Dv up to R][lanes]`.
    pub(super) out: &'s mut [f32],
    /// S^T, then P^T, `[KEY_BLOCK][lanes]`.
    pub(super) p: &'s mut [f32],
    /// The bias, of the size of `ScoreTerms::scratch`.
    pub(super) bias: &'s mut [f32],
}

impl Forward<'_> {
    /// Adds the keys of a step to the outputs and the softmax state of its queries.
    ///
    /// # Safety
    /// The keys and values of the step's head have been packed into its slot, and the buffers are those of its block.
    #[inline(always)]
    pub(super) unsafe fn step<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        step: &BlockStep,
        at: &mut Buffers,
        state: &mut BlockState<S::V, N>,
    ) {
        let (keys, lanes) = (step.keys.len(), N * S::LANES);
        let mut visible = VisibleKeys::<N>::all(keys);
        if step.border {
            visible.find_bounds(self.plan, step.task.block, step.part, step.base, keys, lanes);
            // Score terms read all products.
            if self.terms.is_none() {
                visible.skip_hidden(S::LANES, R);
            }
        }
        let mut max = [simd.splat(f32::NEG_INFINITY); N];
        // SAFETY: the contract of the caller, which is that of each of these.
        unsafe {
            self.multiply_common::<S, R, N>(simd, step, &visible, at, &mut max);
            self.multiply_border::<S, R, N>(simd, step, &visible, at, &mut max);
            let terms = self.terms.map(|terms| {
                let (block_terms, maxima) = self.apply_terms::<S, N>(simd, terms, step, &visible, at);
                max = maxima;
                (terms, block_terms)
            });
            // With terms, the buffer holds scores, which are scaled already.
            let factor = if terms.is_some() { 1.0 } else { self.scaling.products };
            let rescale = self.softmax_step::<S, N>(simd, keys, factor, max, at.p, state);
            if let Some((terms, block_terms)) = &terms {
                terms.apply_dropout(block_terms, lanes, at.p);
                self.pair_weights::<S, N>(simd, keys, at.p);
            }
            self.add_values::<S, R, N>(simd, step, &visible, &rescale, at);
        }
    }

    /// Multiplies all queries with the keys that are computed for all of them, masks the products if there are no score
    /// terms, and updates their maxima.
    ///
    /// # Safety
    /// As for [`step`](Self::step).
    #[inline(always)]
    unsafe fn multiply_common<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        step: &BlockStep,
        visible: &VisibleKeys<N>,
        at: &mut Buffers,
        max: &mut [S::V; N],
    ) {
        let (part, lanes, depth) = (step.part, N * S::LANES, self.q.dim.div_ceil(S::PAIR));
        let mask = step.border && self.terms.is_none();
        let (low, high) = &visible.bounds;
        // SAFETY: the head has been packed, by contract.
        let panels = unsafe { self.keys.keys(step.task.slot, step.keys.start) };
        for row in visible.common.clone().step_by(R) {
            let zero = [[simd.splat(0.0); N]; R];
            // SAFETY: the panel is [D][R], q is [D][lanes]; low and high have 64 lanes; p has KEY_BLOCK rows.
            unsafe {
                let panel = panels.as_ptr().add(row * depth);
                let mut s = multiply::<S, R, N>(simd, depth, panel, 1, R, at.q.as_ptr(), lanes, zero);
                if mask && (step.base + row < part.all.start || step.base + row + R > part.all.end) {
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
                        simd.store(at.p.as_mut_ptr().add((row + i) * lanes + v * S::LANES), s[v]);
                    }
                }
            }
        }
    }

    /// Multiplies each vector of queries with the keys at the border that only some vectors see, masks the products, and
    /// updates their maxima.
    ///
    /// # Safety
    /// As for [`step`](Self::step).
    #[inline(always)]
    unsafe fn multiply_border<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        step: &BlockStep,
        visible: &VisibleKeys<N>,
        at: &mut Buffers,
        max: &mut [S::V; N],
    ) {
        let (lanes, depth) = (N * S::LANES, self.q.dim.div_ceil(S::PAIR));
        let VisibleKeys { bounds: (low, high), spans, common } = visible;
        // SAFETY: the head has been packed, by contract.
        let panels = unsafe { self.keys.keys(step.task.slot, step.keys.start) };
        for row in (0..common.start).chain(common.end..step.keys.len()).step_by(R) {
            for v in 0..N {
                let hidden = simd.splat(f32::NEG_INFINITY);
                let mut s = [[hidden]; R];
                // SAFETY: the panel is [D][R], q is [D][lanes]; low and high have 64 lanes; p has KEY_BLOCK rows.
                unsafe {
                    if spans[v].contains(&row) {
                        let (panel, q) = (panels.as_ptr().add(row * depth), at.q.as_ptr().add(v * S::LANES));
                        s = multiply::<S, R, 1>(simd, depth, panel, 1, R, q, lanes, [[simd.splat(0.0)]; R]);
                    }
                    let low = simd.load(low.as_ptr().add(v * S::LANES));
                    let high = simd.load(high.as_ptr().add(v * S::LANES));
                    for (i, [s]) in s.into_iter().enumerate() {
                        let s = simd.within(s, simd.splat((row + i) as f32), low, high, hidden);
                        max[v] = simd.max(max[v], s);
                        simd.store(at.p.as_mut_ptr().add((row + i) * lanes + v * S::LANES), s);
                    }
                }
            }
        }
    }

    /// Turns products into scores with all terms, masked; returns the terms and the maxima of the scores.
    ///
    /// # Safety
    /// As for [`step`](Self::step); `p` holds the products of all keys.
    #[inline(always)]
    unsafe fn apply_terms<S: Simd, const N: usize>(
        &self,
        simd: S,
        terms: &ScoreTerms,
        step: &BlockStep,
        visible: &VisibleKeys<N>,
        at: &mut Buffers,
    ) -> (BlockTerms, [S::V; N]) {
        let block_pair = self.plan.block_pair(step.task.block, step.part, step.base);
        let block_terms = terms.prepare(simd, block_pair, step.task.head, step.keys.len(), N * S::LANES, at.bias);
        let mut max = [simd.splat(f32::NEG_INFINITY); N];
        let bounds = step.border.then_some(&visible.bounds);
        // SAFETY: p and bias are [KEY_BLOCK][lanes].
        unsafe {
            terms.scores::<S, N>(
                simd,
                self.scaling.products,
                &block_terms,
                at.p.as_mut_ptr(),
                at.bias,
                bounds,
                &mut max,
            )
        };
        (block_terms, max)
    }

    /// Turns the scores in `p`, which are numbers times `factor` with the maxima `max`, into weights, and adds them to the
    /// softmax state. Returns the factors on the outputs of earlier keys.
    ///
    /// # Safety
    /// `p` is `[KEY_BLOCK][lanes]`, and `keys`, its rows in use, are whole pairs.
    #[inline(always)]
    unsafe fn softmax_step<S: Simd, const N: usize>(
        &self,
        simd: S,
        keys: usize,
        factor: f32,
        mut max: [S::V; N],
        p: &mut [f32],
        state: &mut BlockState<S::V, N>,
    ) -> [S::V; N] {
        let (lanes, scale) = (N * S::LANES, simd.splat(factor));
        if S::PAIR == 1 && factor != 1.0 {
            for at in (0..keys * N).map(|vector| vector * S::LANES) {
                // SAFETY: p has KEY_BLOCK rows of lanes.
                unsafe { simd.store(p.as_mut_ptr().add(at), simd.mul(simd.load(p.as_ptr().add(at)), scale)) };
            }
        }
        // A lane that has seen nothing keeps the maximum -inf; subtracting a finite number instead avoids NaN.
        let (mut finite, mut rescale) = (max, max);
        for v in 0..N {
            max[v] = simd.max(state.max[v], simd.mul(max[v], scale));
            finite[v] = simd.max(max[v], simd.splat(f32::MIN));
            rescale[v] = exp(simd, simd.sub(state.max[v], finite[v]));
        }
        let mut sum = [simd.splat(0.0); N];
        for row in (0..keys).step_by(S::PAIR) {
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
                    let x = exp(simd, simd.sub(simd.mul(simd.load(at), scale), finite[v]));
                    let y = exp(simd, simd.sub(simd.mul(simd.load(at.add(lanes)), scale), finite[v]));
                    sum[v] = simd.add(sum[v], simd.add(x, y));
                    if self.terms.is_some() {
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
            state.sum[v] = simd.fma(state.sum[v], rescale[v], sum[v]);
        }
        state.max = max;
        rescale
    }

    /// Rounds weights to pairs of bf16 along the keys, if products take pairs. Without score terms, the softmax did so.
    ///
    /// # Safety
    /// `p` is `[KEY_BLOCK][lanes]`.
    #[inline(always)]
    unsafe fn pair_weights<S: Simd, const N: usize>(&self, simd: S, keys: usize, p: &mut [f32]) {
        if S::PAIR == 1 {
            return;
        }
        let lanes = N * S::LANES;
        for row in 0..keys / 2 {
            for lane in (0..lanes).step_by(S::LANES) {
                // SAFETY: p has KEY_BLOCK rows of lanes; the row written here has been read: it is one of the two rows, or
                // before them.
                unsafe {
                    let from = p.as_ptr().add(2 * row * lanes + lane);
                    let weights = simd.pair(simd.load(from), simd.load(from.add(lanes)));
                    simd.store(p.as_mut_ptr().add(row * lanes + lane), weights);
                }
            }
        }
    }

    /// Rescales the outputs and adds the values, multiplied by their weights.
    ///
    /// # Safety
    /// As for [`step`](Self::step); `p` holds the weights.
    #[inline(always)]
    unsafe fn add_values<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        step: &BlockStep,
        visible: &VisibleKeys<N>,
        rescale: &[S::V; N],
        at: &mut Buffers,
    ) {
        let (lanes, p) = (N * S::LANES, at.p.as_ptr());
        let VisibleKeys { bounds: (low, high), spans, common } = visible;
        // Multiplying by a weight of 0 does not hide NaN and infinities.
        let mask_products = step.border && self.keys.has_non_finite(step.task.slot, &step.keys);
        for column in (0..self.v_dim).step_by(R) {
            // SAFETY: the head has been packed, by contract.
            let values = unsafe { self.keys.values::<R>(step.task.slot, column, step.keys.start) }.as_ptr();
            // SAFETY: values are [keys][R], p [keys][lanes], either may be pairs, and out has whole panels of R columns.
            unsafe {
                let out = at.out.as_mut_ptr().add(column * lanes);
                let mut acc = [[simd.splat(0.0); N]; R];
                for (i, acc) in acc.iter_mut().enumerate() {
                    for (v, x) in acc.iter_mut().enumerate() {
                        *x = simd.mul(rescale[v], simd.load(out.add(i * lanes + v * S::LANES)));
                    }
                }
                if mask_products {
                    let depth = step.keys.len() / S::PAIR;
                    acc = multiply_masked::<S, R, N>(simd, depth, values, R, p, lanes, (low, high), acc);
                } else {
                    // Products are added in the order of the keys, as where they are masked: so queries that see only
                    // finite values keep their bits.
                    for (v, span) in spans.iter().enumerate() {
                        let before = span.start..span.end.min(common.start);
                        multiply_one::<S, R, N>(simd, &before, values, p, lanes, v, &mut acc);
                    }
                    let (first, depth) = (common.start / S::PAIR, common.len() / S::PAIR);
                    let (values_first, p_first) = (values.add(first * R), p.add(first * lanes));
                    acc = multiply::<S, R, N>(simd, depth, values_first, 1, R, p_first, lanes, acc);
                    for (v, span) in spans.iter().enumerate() {
                        let after = span.start.max(common.end)..span.end;
                        multiply_one::<S, R, N>(simd, &after, values, p, lanes, v, &mut acc);
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
