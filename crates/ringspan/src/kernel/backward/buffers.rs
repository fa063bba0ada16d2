//! The buffers of a worker of the backward pass, for its blocks of queries and the current block of keys.

use super::super::KEY_BLOCK;
use super::super::buffer::lines;
use super::super::isa::TargetFeatures;
use super::super::terms::ScoreTerms;

/// Sizes of a worker's buffers in elements, rounded up to whole cache lines.
#[derive(Clone, Copy)]
pub(in super::super) struct BufferSizes {
    pub(super) lanes: usize,
    /// D and Dv, rounded up to whole vectors.
    pub(super) wide: usize,
    pub(super) v_wide: usize,
    /// D and Dv, in elements of products: numbers or pairs.
    pub(super) depth: usize,
    pub(super) v_depth: usize,
    /// Length of a row of P^T or dS^T in pairs, rounded up to whole vectors.
    pub(super) half_row: usize,
    q_t: usize,
    d_out_t: usize,
    q: usize,
    d_out: usize,
    dq: usize,
    statistics: usize,
    k_panels: usize,
    v_panels: usize,
    k: usize,
    dk: usize,
    dv: usize,
    p: usize,
    halves: usize,
    bias: usize,
}

impl BufferSizes {
    pub(in super::super) fn new(dim: usize, v_dim: usize, features: TargetFeatures, bias: bool) -> Self {
        let (lanes, vector, pair) = (features.lanes(), features.vector(), features.pair());
        let (wide, v_wide) = (dim.next_multiple_of(vector), v_dim.next_multiple_of(vector));
        let (depth, v_depth) = (dim.div_ceil(pair), v_dim.div_ceil(pair));
        let half_row = (lanes / 2).next_multiple_of(vector);
        Self {
            lanes,
            wide,
            v_wide,
            depth,
            v_depth,
            half_row,
            q_t: lines(lanes * depth),
            d_out_t: lines(lanes * v_depth),
            q: lines(lanes / pair * wide),
            d_out: lines(lanes / pair * v_wide),
            dq: lines(lanes * wide),
            statistics: lines(3 * lanes),
            k_panels: lines(KEY_BLOCK * depth),
            v_panels: lines(KEY_BLOCK * v_depth),
            k: lines(KEY_BLOCK / pair * wide),
            dk: lines(KEY_BLOCK * wide),
            dv: lines(KEY_BLOCK * v_wide),
            p: lines(KEY_BLOCK * lanes),
            halves: if pair == 1 { 0 } else { lines(KEY_BLOCK * half_row) },
            bias: ScoreTerms::scratch(bias, lanes),
        }
    }

    /// Number of elements stored for a block of queries.
    pub(super) fn block(self) -> usize {
        self.q_t + self.d_out_t + self.q + self.d_out + self.dq + self.statistics
    }

    /// Number of elements stored for a block of keys.
    fn keys(self) -> usize {
        let operands = self.k_panels + self.v_panels + self.k;
        // `2 * halves` and `pairs` hold P^T in pairs along the lanes, and dS^T in pairs along the lanes and along the keys.
        operands + self.dk + self.dv + 2 * self.p + 2 * self.halves + self.pairs() + self.bias
    }

    fn pairs(self) -> usize {
        if self.halves == 0 { 0 } else { self.p / 2 }
    }

    /// Number of elements of a worker's scratch for `blocks` blocks of queries.
    pub(in super::super) fn scratch(self, blocks: usize) -> usize {
        blocks * self.block() + self.keys()
    }
}

/// The buffers of one block of queries.
pub(super) struct QueryBlock<'s> {
    /// Q^T, `[D][lanes]`.
    pub(super) q_t: &'s mut [f32],
    /// dO^T, `[Dv][lanes]`.
    pub(super) d_out_t: &'s mut [f32],
    /// Q, `[lanes][wide]`.
    pub(super) q: &'s mut [f32],
    /// dO, `[lanes][v_wide]`.
    pub(super) d_out: &'s mut [f32],
    /// dQ, `[lanes][wide]`.
    pub(super) dq: &'s mut [f32],
    /// Maximum of the softmax, inverse of its sum, and delta, `[lanes]` each.
    pub(super) statistics: &'s mut [f32],
}

impl<'s> QueryBlock<'s> {
    /// Divides a buffer of `sizes.block()` elements.
    #[inline(always)]
    pub(super) fn of(sizes: BufferSizes, buffer: &'s mut [f32]) -> Self {
        let (q_t, rest) = buffer.split_at_mut(sizes.q_t);
        let (d_out_t, rest) = rest.split_at_mut(sizes.d_out_t);
        let (q, rest) = rest.split_at_mut(sizes.q);
        let (d_out, rest) = rest.split_at_mut(sizes.d_out);
        let (dq, statistics) = rest.split_at_mut(sizes.dq);
        Self { q_t, d_out_t, q, d_out, dq, statistics }
    }
}

/// The buffers of one block of keys.
pub(super) struct KeyBlock<'s> {
    /// K and V in panels.
    pub(super) k_panels: &'s mut [f32],
    pub(super) v_panels: &'s mut [f32],
    /// K, `[KEY_BLOCK][wide]`.
    pub(super) k: &'s mut [f32],
    /// dK, `[KEY_BLOCK][wide]`.
    pub(super) dk: &'s mut [f32],
    /// dV, `[KEY_BLOCK][v_wide]`.
    pub(super) dv: &'s mut [f32],
    /// P^T and dS^T `[KEY_BLOCK][lanes]`.
    pub(super) p: &'s mut [f32],
    pub(super) ds: &'s mut [f32],
    /// P^T and dS^T in pairs along the lanes, `[KEY_BLOCK][half_row]`; dS^T in pairs along the keys, `[KEY_BLOCK /
    /// 2][lanes]`.
    pub(super) p_halves: &'s mut [f32],
    pub(super) ds_halves: &'s mut [f32],
    pub(super) ds_pairs: &'s mut [f32],
    /// The bias, then its gradient, `[KEY_BLOCK][lanes]`.
    pub(super) bias: &'s mut [f32],
    /// Gradient of the head's buckets, `[count]`.
    pub(super) table: &'s mut [f64],
    /// Whether any key or value of the block is not finite.
    pub(super) has_non_finite: bool,
}

impl<'s> KeyBlock<'s> {
    /// Divides a buffer of `sizes.keys()` elements.
    pub(super) fn of(sizes: BufferSizes, buffer: &'s mut [f32], table: &'s mut [f64]) -> Self {
        let (k_panels, rest) = buffer.split_at_mut(sizes.k_panels);
        let (v_panels, rest) = rest.split_at_mut(sizes.v_panels);
        let (k, rest) = rest.split_at_mut(sizes.k);
        let (dk, rest) = rest.split_at_mut(sizes.dk);
        let (dv, rest) = rest.split_at_mut(sizes.dv);
        let (p, rest) = rest.split_at_mut(sizes.p);
        let (ds, rest) = rest.split_at_mut(sizes.p);
        let (p_halves, rest) = rest.split_at_mut(sizes.halves);
        let (ds_halves, rest) = rest.split_at_mut(sizes.halves);
        let (ds_pairs, rest) = rest.split_at_mut(sizes.pairs());
        let bias = &mut rest[..sizes.bias];
        let has_non_finite = false;
        Self { k_panels, v_panels, k, dk, dv, p, ds, p_halves, ds_halves, ds_pairs, bias, table, has_non_finite }
    }
}
