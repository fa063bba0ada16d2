//! Score terms besides scaled products (softcap, relative terms, bias, dropout), for a block of queries and a block of
//! keys.
//!
//! The blocked kernels write raw products to a buffer `[key][lane]` and call one pass over it, forward or backward. A call
//! without such terms has no [`ScoreTerms`] and no cost.

use super::dropout::{column, keeps};
use super::pack::columns;
use super::plan::BlockPair;
use super::relative_bias::RelativeTerms;
use super::vector::{Simd, exp, tanh};
use super::{Buckets, Dropout, KEY_BLOCK, RelativeBias, Score, View};

/// Maximum number of queries in a block.
pub(super) const LANES: usize = 64;

/// The score terms of a call.
pub(super) struct ScoreTerms<'a> {
    softcap: Option<f32>,
    relative: Option<RelativeTerms<'a>>,
    bias: Option<View<'a>>,
    dropout: Option<Dropout>,
}

/// The terms of all pairs of one block of queries and one block of keys.
pub(super) struct BlockTerms {
    block_pair: BlockPair,
    /// Number of keys in the block.
    keys: usize,
    /// Relative terms by `lane + keys - 1 - key`, so that the terms of neighbouring lanes are contiguous.
    diagonal: [f32; LANES + KEY_BLOCK],
    /// Dropout's random words of the lanes and of the keys.
    rows: [[u32; LANES]; 2],
    columns: [u32; KEY_BLOCK],
}

/// For each lane, the start and end of its visible keys.
pub(super) type Bounds = ([f32; LANES], [f32; LANES]);

/// The sums to which the backward pass adds the gradients of terms, with the statistics it needs.
pub(super) struct TermSums<'a> {
    /// Gradients of the head's buckets `[count]`, in f64, because nearly all pairs can be in the last bucket.
    pub(super) table: &'a mut [f64],
    /// For each lane the maximum of the softmax, the inverse of its sum, and delta.
    pub(super) max: &'a [f32],
    pub(super) inverse_sum: &'a [f32],
    pub(super) delta: &'a [f32],
}

impl<'a> ScoreTerms<'a> {
    /// The terms that `score` and `bias` need besides a factor; `None` if there are none.
    pub(super) fn new(score: &'a Score, bias: Option<View<'a>>) -> Option<Self> {
        let Score { softcap, dropout, .. } = *score;
        let dropout = dropout.filter(|dropout| dropout.rate > 0.0);
        let relative = score.relative.as_ref().map(RelativeTerms::new);
        let any = softcap.is_some() || relative.is_some() || bias.is_some() || dropout.is_some();
        any.then_some(Self { softcap, relative, bias, dropout })
    }

    /// Number of elements of a buffer for the bias of a pair of blocks.
    pub(super) fn scratch(bias: bool, lanes: usize) -> usize {
        if bias { KEY_BLOCK * lanes } else { 0 }
    }

    fn buckets(&self) -> Option<&'a Buckets> {
        match self.relative.as_ref()?.relative {
            RelativeBias::Buckets(buckets) => Some(buckets),
            RelativeBias::Alibi { .. } => None,
        }
    }

    /// Prepares the terms of `keys` keys; `bias` is a buffer `[KEY_BLOCK][lanes]`, empty without a bias.
    #[inline(always)]
    pub(super) fn prepare<S: Simd>(
        &self,
        simd: S,
        block_pair: BlockPair,
        head: usize,
        keys: usize,
        lanes: usize,
        bias: &mut [f32],
    ) -> BlockTerms {
        let mut block = BlockTerms {
            block_pair,
            keys,
            diagonal: [0.0; LANES + KEY_BLOCK],
            rows: [[0; LANES]; 2],
            columns: [0; KEY_BLOCK],
        };
        if let Some(relative) = &self.relative {
            for (at, term) in block.diagonal.iter_mut().enumerate().take(lanes + keys - 1) {
                *term = relative.term(head, block.block_pair.distance(at as i64 - (keys as i64 - 1)));
            }
        }
        if let Some(dropout) = self.dropout {
            for lane in 0..lanes {
                let [a, b] = dropout.row(head, block.block_pair.query(lane));
                (block.rows[0][lane], block.rows[1][lane]) = (a, b);
            }
            for (key, word) in block.columns.iter_mut().enumerate().take(keys) {
                *word = column(block.block_pair.key(key));
            }
        }
        if let Some(view) = &self.bias {
            bias[..keys * lanes].fill(0.0);
            let held = block.block_pair.keys(keys);
            let head = head.min(view.heads - 1);
            let row = |lane: usize| Some(view.at(block.block_pair.row(lane)?, head));
            if block.block_pair.step() == 1 {
                let first = block.block_pair.key(held.start);
                let row = |lane: usize| Some(row(lane)?.slice(first..first + held.len()));
                columns(simd, &mut bias[held.start * lanes..], held.len(), lanes, 1.0, row);
            } else {
                for (lane, row) in (0..lanes).filter_map(|lane| Some((lane, row(lane)?))) {
                    for key in held.clone() {
                        bias[key * lanes + lane] = row.get(block.block_pair.key(key));
                    }
                }
            }
        }
        block
    }

    /// Turns products `s` `[keys][lanes]`, times `factor`, into scores, with -inf where the mask hides them, and computes
    /// their maxima `max` over the keys.
    ///
    /// # Safety
    /// `s` must be `[keys][lanes]`, and `bias` the buffer that [`prepare`](Self::prepare) filled.
    #[allow(clippy::too_many_arguments)] // This is a loop body that two functions share.
    #[inline(always)]
    pub(super) unsafe fn scores<S: Simd, const N: usize>(
        &self,
        simd: S,
        factor: f32,
        block: &BlockTerms,
        s: *mut f32,
        bias: &[f32],
        bounds: Option<&Bounds>,
        max: &mut [S::V; N],
    ) {
        for key in 0..block.keys {
            for (v, max) in max.iter_mut().enumerate() {
                // SAFETY: the vector lies in row `key` of s and of the bias.
                unsafe {
                    let at = s.add((key * N + v) * S::LANES);
                    let (x, _) = self.score::<S, N>(simd, factor, block, simd.load(at), bias, bounds, key, v);
                    *max = simd.max(*max, x);
                    simd.store(at, x);
                }
            }
        }
    }

    /// Turns a vector of products, times `factor`, into scores; also returns the slope of the softcap there.
    ///
    /// # Safety
    /// As for [`scores`](Self::scores).
    #[allow(clippy::too_many_arguments)] // This is a loop body that two functions share.
    #[inline(always)]
    unsafe fn score<S: Simd, const N: usize>(
        &self,
        simd: S,
        factor: f32,
        block: &BlockTerms,
        x: S::V,
        bias: &[f32],
        bounds: Option<&Bounds>,
        key: usize,
        v: usize,
    ) -> (S::V, S::V) {
        let (mut x, mut slope) = (x, simd.splat(1.0));
        x = simd.mul(x, simd.splat(factor));
        if let Some(cap) = self.softcap {
            let t = tanh(simd, x);
            slope = simd.sub(slope, simd.mul(t, t));
            x = simd.mul(t, simd.splat(cap));
        }
        // SAFETY: the diagonal has an element for each lane and key, and a vector to spare; the bias is [keys][lanes].
        unsafe {
            if self.relative.is_some() {
                let at = v * S::LANES + block.keys - 1 - key;
                x = simd.add(x, simd.load(block.diagonal.as_ptr().add(at)));
            }
            if self.bias.is_some() {
                x = simd.add(x, simd.load(bias.as_ptr().add((key * N + v) * S::LANES)));
            }
            if let Some((low, high)) = bounds {
                let (low, high) =
                    (simd.load(low.as_ptr().add(v * S::LANES)), simd.load(high.as_ptr().add(v * S::LANES)));
                x = simd.within(x, simd.splat(key as f32), low, high, simd.splat(f32::NEG_INFINITY));
            }
        }
        (x, slope)
    }

    /// Applies dropout to the weights `p` `[keys][lanes]`.
    #[inline(always)]
    pub(super) fn apply_dropout(&self, block: &BlockTerms, lanes: usize, p: &mut [f32]) {
        let Some(dropout) = self.dropout else { return };
        let mut kept = [0.0; LANES];
        for (key, p) in p.chunks_exact_mut(lanes).enumerate().take(block.keys) {
            block.kept(dropout, key, &mut kept);
            p.iter_mut().zip(&kept).for_each(|(p, kept)| *p *= kept);
        }
    }

    /// Turns products `p`, times `factor`, and products `ds` of output gradients and values, both `[keys][lanes]`, into the
    /// weights of the values and the gradients of the scaled products. Adds the gradients of terms to `sums`, and replaces
    /// the bias in `bias` by its gradient.
    ///
    /// # Safety
    /// `p` and `ds` must be `[keys][lanes]`, `bias` the buffer that [`prepare`](Self::prepare) filled, and the statistics in `sums` have
    /// `lanes` elements.
    #[allow(clippy::too_many_arguments)] // The arguments are two blocks and all that changes them.
    #[inline(always)]
    pub(super) unsafe fn gradients<S: Simd, const N: usize>(
        &self,
        simd: S,
        factor: f32,
        block: &BlockTerms,
        p: *mut f32,
        ds: *mut f32,
        bias: &mut [f32],
        bounds: Option<&Bounds>,
        sums: &mut TermSums,
    ) {
        let mut kept = [1.0; LANES];
        let mut diagonal = [0.0f32; LANES + KEY_BLOCK];
        let buckets = self.buckets();
        for key in 0..block.keys {
            if let Some(dropout) = self.dropout {
                block.kept(dropout, key, &mut kept);
            }
            for v in 0..N {
                let (lane, at) = (v * S::LANES, (key * N + v) * S::LANES);
                // SAFETY: the vector lies in row `key` of p, ds and the bias, and at `lane` of lane vectors; the diagonal
                // has an element for each lane and key.
                unsafe {
                    let (s, slope) =
                        self.score::<S, N>(simd, factor, block, simd.load(p.add(at)), bias, bounds, key, v);
                    let kept = simd.load(kept.as_ptr().add(lane));
                    let power = exp(simd, simd.sub(s, simd.load(sums.max.as_ptr().add(lane))));
                    let weight = simd.mul(power, simd.load(sums.inverse_sum.as_ptr().add(lane)));
                    let dp = simd.sub(simd.mul(kept, simd.load(ds.add(at))), simd.load(sums.delta.as_ptr().add(lane)));
                    let mut gradient = simd.mul(weight, dp);
                    if let Some((low, high)) = bounds {
                        // If a query saw a NaN, its sum is NaN, which would also spread to keys that it does not see.
                        let (low, high) = (simd.load(low.as_ptr().add(lane)), simd.load(high.as_ptr().add(lane)));
                        gradient = simd.within(gradient, simd.splat(key as f32), low, high, simd.splat(0.0));
                    }
                    simd.store(p.add(at), simd.mul(weight, kept));
                    simd.store(ds.add(at), simd.mul(gradient, slope));
                    if buckets.is_some() {
                        let at = diagonal.as_mut_ptr().add(lane + block.keys - 1 - key);
                        simd.store(at, simd.add(simd.load(at), gradient));
                    }
                    if self.bias.is_some() {
                        simd.store(bias.as_mut_ptr().add(at), gradient);
                    }
                }
            }
        }
        if let (Some(buckets), Some(relative)) = (buckets, &self.relative) {
            for (at, sum) in diagonal.iter().enumerate().take(N * S::LANES + block.keys - 1) {
                let distance = block.block_pair.distance(at as i64 - (block.keys as i64 - 1));
                sums.table[relative.bucket(buckets, distance)] += f64::from(*sum);
            }
        }
    }

    /// Adds the gradients that [`gradients`](Self::gradients) left in `bias` to the row of a query's bias gradient.
    #[inline(always)]
    pub(super) fn add_bias(block: &BlockTerms, lanes: usize, bias: &[f32], lane: usize, row: &mut [f32]) {
        for key in block.block_pair.keys(block.keys) {
            row[block.block_pair.key(key)] += bias[key * lanes + lane];
        }
    }

    /// Turns scaled products of one query into scores; `s[i]` belongs to row `first + i` of the tile's keys.
    #[inline(always)]
    pub(super) fn score_single_query<S: Simd>(&self, simd: S, head: usize, block_pair: &BlockPair, s: &mut [f32]) {
        if let Some(cap) = self.softcap {
            for s in s.chunks_exact_mut(S::LANES) {
                // SAFETY: the chunk has LANES numbers.
                unsafe { simd.store(s.as_mut_ptr(), tanh(simd, simd.load(s.as_ptr()))) };
            }
            let rest = s.len() / S::LANES * S::LANES;
            s[rest..].iter_mut().for_each(|s| *s = s.tanh());
            s.iter_mut().for_each(|s| *s *= cap);
        }
        if let Some(relative) = &self.relative {
            for (key, s) in s.iter_mut().enumerate() {
                *s += relative.term(head, block_pair.distance(-(key as i64)));
            }
        }
        if let Some(view) = &self.bias {
            let row = view.at(block_pair.first_row(), head.min(view.heads - 1));
            for (key, s) in s.iter_mut().enumerate() {
                *s += row.get(block_pair.key(key));
            }
        }
    }

    /// Applies dropout to the weights of one query.
    #[inline(always)]
    pub(super) fn drop_single_query(&self, head: usize, block_pair: &BlockPair, p: &mut [f32]) {
        let Some(dropout) = self.dropout else { return };
        let (row, threshold, scale) = (dropout.row(head, block_pair.query(0)), dropout.threshold(), dropout.scale());
        for (key, p) in p.iter_mut().enumerate() {
            *p *= if keeps(row, column(block_pair.key(key)), threshold) { scale } else { 0.0 };
        }
    }
}

impl BlockTerms {
    /// The factors on the weights of one key, for all lanes: 0 or the scale of kept weights.
    #[inline(always)]
    fn kept(&self, dropout: Dropout, key: usize, kept: &mut [f32; LANES]) {
        let (column, threshold, scale) = (self.columns[key], dropout.threshold(), dropout.scale());
        for (lane, kept) in kept.iter_mut().enumerate() {
            let row = [self.rows[0][lane], self.rows[1][lane]];
            *kept = if keeps(row, column, threshold) { scale } else { 0.0 };
        }
    }

    /// The row of a lane's query, if it is in the tile.
    pub(super) fn row(&self, lane: usize) -> Option<usize> {
        self.block_pair.row(lane)
    }
}
