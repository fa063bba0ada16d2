//! The blocked backward kernel: five products, none of which needs a transpose inside the loop.
//!
//! Blocks of keys outside, pairs of query panels inside. Scores and dP are made with lanes = queries, as in the forward
//! pass; the weights P and dS they give are then only ever *broadcast*, so dV += P dO, dK += dS Q and dQ += dS^T K read
//! dO, Q and K row by row.

use super::forward::Block;
use super::pack::{Segments, by_panel, by_row, transposed};
use super::simd::{PANEL_VECTORS, Simd, exp2, multiply};
use super::{HeadMap, Score, Tile, View};
use std::collections::BTreeMap;
use std::ops::Range;

/// Keys of a block; a multiple of the rows of all micro kernels.
const KEY_BLOCK: usize = 96;

/// What the backward pass reads of the forward pass.
#[derive(Clone, Copy)]
pub(super) struct Saved<'a> {
    /// `[H, Tq]`
    pub(super) lse: &'a [f32],
    /// `[H, Tq]`
    pub(super) delta: &'a [f32],
    /// `[Tq, H, Dv]`
    pub(super) d_out: View<'a>,
}

/// Gradients of one key-value head and its query heads, in packed rows of padded width.
pub(super) struct HeadGradients {
    /// Of each query head that reads the key-value head.
    dq: Vec<Vec<f32>>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

/// One call: inputs, and how their rows are packed.
pub(super) struct Call<'a> {
    q: View<'a>,
    k: View<'a>,
    v: View<'a>,
    saved: Saved<'a>,
    heads: &'a HeadMap,
    score: Score,
    by_keys: BTreeMap<(usize, usize), Vec<&'a Tile>>,
    keys: Segments,
    queries: Segments,
    dim: usize,
    v_dim: usize,
}

impl<'a> Call<'a> {
    #[allow(clippy::too_many_arguments)] // Three tensors, what is visible, and what the forward pass left.
    pub(super) fn new<S: Simd>(
        q: View<'a>,
        k: View<'a>,
        v: View<'a>,
        heads: &'a HeadMap,
        tiles: &'a [Tile],
        score: &Score,
        saved: Saved<'a>,
    ) -> Self {
        let mut by_keys: BTreeMap<(usize, usize), Vec<&Tile>> = BTreeMap::new();
        for tile in tiles.iter().filter(|tile| !tile.q.is_empty() && !tile.k.is_empty()) {
            by_keys.entry((tile.k.start, tile.k.end)).or_default().push(tile);
        }
        Self {
            q,
            k,
            v,
            saved,
            heads,
            score: *score,
            by_keys,
            keys: Segments::of_keys(tiles, S::ROWS),
            queries: Segments::of_queries(tiles, S::PANEL),
            dim: q.dim.next_multiple_of(S::LANES),
            v_dim: v.dim.next_multiple_of(S::LANES),
        }
    }

    /// Elements that one worker of the call allocates.
    pub(super) fn workspace<S: Simd>(&self) -> usize {
        let (keys, queries) = (self.keys.rows, self.queries.rows);
        let readers = (0..self.k.heads).map(|head| self.heads.readers(head).len()).max().unwrap_or(0);
        keys * (self.q.dim + self.v.dim + 2 * self.dim + self.v_dim)
            + queries * (self.q.dim + self.v.dim + self.dim + self.v_dim + 2 + readers * self.dim)
            + 4 * KEY_BLOCK * S::PANEL
    }

    /// Adds the gradients of a head to those of all.
    pub(super) fn add(&self, kv_head: usize, head: &HeadGradients, dq: &mut [f32], dk: &mut [f32], dv: &mut [f32]) {
        let add = |segments: &Segments, from: &[f32], padded: usize, dim: usize, to: &mut [f32], heads: usize, head| {
            for (range, at) in segments.iter() {
                for (i, token) in range.enumerate() {
                    let to = &mut to[(token * heads + head) * dim..][..dim];
                    for (sum, x) in to.iter_mut().zip(&from[(at + i) * padded..]) {
                        *sum += x;
                    }
                }
            }
        };
        for (query_head, from) in self.heads.readers(kv_head).zip(&head.dq) {
            add(&self.queries, from, self.dim, self.q.dim, dq, self.q.heads, query_head);
        }
        add(&self.keys, &head.dk, self.dim, self.k.dim, dk, self.k.heads, kv_head);
        add(&self.keys, &head.dv, self.v_dim, self.v.dim, dv, self.v.heads, kv_head);
    }
}

/// Gradients of key-value head `kv_head` from every `step`-th block of keys, the first being number `first`.
///
/// # Safety
/// The processor must have the instructions of `S`, `R` must be `S::ROWS`, and all rows the tiles name must exist.
#[inline(always)]
pub(super) unsafe fn run<S: Simd, const R: usize, const M: usize, const N: usize>(
    call: &Call,
    kv_head: usize,
    first: usize,
    step: usize,
) -> HeadGradients {
    let mut gradients = HeadGradients {
        dq: Vec::new(),
        dk: vec![0.0; call.keys.rows * call.dim],
        dv: vec![0.0; call.keys.rows * call.v_dim],
    };
    let keys = Keys {
        k_panels: by_panel(&call.k, kv_head, &call.keys, R),
        v_panels: by_panel(&call.v, kv_head, &call.keys, R),
        k_rows: by_row(&call.k, kv_head, &call.keys, call.dim),
    };
    let mut weights = Weights::new::<S>();
    for head in call.heads.readers(kv_head) {
        let queries = Queries::new::<S>(call, head);
        let mut dq = vec![0.0; call.queries.rows * call.dim];
        let mut number = 0;
        for (&(start, stop), tiles) in &call.by_keys {
            for from in (0..stop - start).step_by(KEY_BLOCK) {
                number += 1;
                if (number - 1) % step != first {
                    continue;
                }
                let range = from..(from + KEY_BLOCK).min((stop - start).next_multiple_of(R));
                for tile in tiles {
                    // SAFETY: the caller's; the range lies in the packed rows of the tile's keys.
                    unsafe {
                        block::<S, R, M, N>(call, tile, range.clone(), &keys, &queries, &mut weights, &mut dq, &mut gradients);
                    }
                }
            }
        }
        dq.iter_mut().for_each(|x| *x *= call.score.scale);
        gradients.dq.push(dq);
    }
    gradients.dk.iter_mut().for_each(|x| *x *= call.score.scale);
    gradients
}

/// Packed keys and values of one head.
struct Keys {
    k_panels: Vec<f32>,
    v_panels: Vec<f32>,
    k_rows: Vec<f32>,
}

/// Packed queries of one head, and their statistics.
struct Queries {
    /// `[panel][D][PANEL]`, scaled for base 2.
    q_panels: Vec<f32>,
    /// `[panel][Dv][PANEL]`
    d_out_panels: Vec<f32>,
    q_rows: Vec<f32>,
    d_out_rows: Vec<f32>,
    /// Base 2; +inf where there is no query, so that weights are 0 there.
    lse: Vec<f32>,
    delta: Vec<f32>,
}

impl Queries {
    fn new<S: Simd>(call: &Call, head: usize) -> Self {
        let (rows, width) = (call.queries.rows, S::PANEL);
        let factor = call.score.scale * std::f32::consts::LOG2_E;
        let panels = |view: &View, factor: f32| {
            let mut panels = vec![0.0; rows * view.dim];
            for (range, at) in call.queries.iter() {
                for (i, first) in range.clone().step_by(width).enumerate() {
                    let panel = &mut panels[(at + i * width) * view.dim..][..width * view.dim];
                    transposed(view, head, first..(first + width).min(range.end), width, factor, panel);
                }
            }
            panels
        };
        let statistic = |values: &[f32], factor: f32, rest: f32| {
            let mut packed = vec![rest; rows];
            for (range, at) in call.queries.iter() {
                for (to, x) in packed[at..].iter_mut().zip(&values[head * call.q.tokens..][range]) {
                    *to = x * factor;
                }
            }
            packed
        };
        Self {
            q_panels: panels(&call.q, factor),
            d_out_panels: panels(&call.saved.d_out, 1.0),
            q_rows: by_row(&call.q, head, &call.queries, call.dim),
            d_out_rows: by_row(&call.saved.d_out, head, &call.queries, call.v_dim),
            lse: statistic(call.saved.lse, std::f32::consts::LOG2_E, f32::INFINITY),
            delta: statistic(call.saved.delta, 1.0, 0.0),
        }
    }
}

/// P and dS of a block, `[KEY_BLOCK][2 * PANEL]`.
struct Weights {
    p: Vec<f32>,
    ds: Vec<f32>,
}

impl Weights {
    fn new<S: Simd>() -> Self {
        let size = KEY_BLOCK * 2 * S::PANEL;
        Self { p: vec![0.0; size], ds: vec![0.0; size] }
    }
}

/// Adds what a block of keys and the queries of a tile give each other.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // The packed inputs and the three places their gradients go.
unsafe fn block<S: Simd, const R: usize, const M: usize, const N: usize>(
    call: &Call,
    tile: &Tile,
    range: Range<usize>,
    keys: &Keys,
    queries: &Queries,
    weights: &mut Weights,
    dq: &mut [f32],
    gradients: &mut HeadGradients,
) {
    let (width, stride) = (S::PANEL, 2 * S::PANEL);
    let (dim, v_dim) = (call.dim, call.v_dim);
    let (key_row, query_row) = (call.keys.row(&tile.k), call.queries.row(&tile.q));
    let n = tile.q.len();
    for first in (0..n).step_by(stride) {
        let count = (n - first).min(stride);
        let seen_first = tile.band.keys(first, tile.k.len()).start.max(range.start);
        let seen_end = tile.band.keys(first + count - 1, tile.k.len()).end.min(range.end);
        if seen_first >= seen_end {
            continue;
        }
        let (from, to) = (seen_first / R * R, seen_end.next_multiple_of(R));
        let panels = count.div_ceil(width);
        // SAFETY: packed rows cover segments rounded up to whole panels, so every row touched here exists; weights have
        // room for KEY_BLOCK keys and two panels of queries.
        unsafe {
            for panel in 0..panels {
                let first_query = first + panel * width;
                let at = query_row + first_query;
                let mut lse = [S::splat(0.0); PANEL_VECTORS];
                let mut delta = lse;
                for i in 0..PANEL_VECTORS {
                    lse[i] = S::load(queries.lse.as_ptr().add(at + i * S::LANES));
                    delta[i] = S::load(queries.delta.as_ptr().add(at + i * S::LANES));
                }
                let view = Block { tile, first_query, queries: (n - first_query).min(width), from, to };
                let q_panel = queries.q_panels.as_ptr().add(at * call.q.dim);
                let d_out_panel = queries.d_out_panels.as_ptr().add(at * call.v.dim);
                for key in (from..to).step_by(R) {
                    let row = key_row + key;
                    let mut s = [[S::splat(0.0); PANEL_VECTORS]; R];
                    let k_panel = keys.k_panels.as_ptr().add(row * call.q.dim);
                    multiply::<S, R, PANEL_VECTORS>(call.q.dim, k_panel, 1, R, q_panel, width, &mut s);
                    let all = view.sees_all(key, R);
                    for (r, s) in s.iter_mut().enumerate() {
                        let (low, high) = if all { (0.0, 0.0) } else { view.lanes(key + r) };
                        let to = weights.p.as_mut_ptr().add((key - from + r) * stride + panel * width);
                        for (i, s) in s.iter_mut().enumerate() {
                            let before = (i * S::LANES) as f32;
                            let p = exp2::<S>(S::sub(*s, lse[i]));
                            let p = if all { p } else { S::within(p, low - before, high - before, S::splat(0.0)) };
                            S::store(to.add(i * S::LANES), p);
                        }
                    }
                    let mut dp = [[S::splat(0.0); PANEL_VECTORS]; R];
                    let v_panel = keys.v_panels.as_ptr().add(row * call.v.dim);
                    multiply::<S, R, PANEL_VECTORS>(call.v.dim, v_panel, 1, R, d_out_panel, width, &mut dp);
                    for (r, dp) in dp.iter().enumerate() {
                        let at = (key - from + r) * stride + panel * width;
                        for (i, dp) in dp.iter().enumerate() {
                            let p = S::load(weights.p.as_ptr().add(at + i * S::LANES));
                            let ds = S::mul(p, S::sub(*dp, delta[i]));
                            S::store(weights.ds.as_mut_ptr().add(at + i * S::LANES), ds);
                        }
                    }
                }
            }
            let (rows, steps) = (to - from, panels * width);
            let (p, ds) = (weights.p.as_ptr(), weights.ds.as_ptr());
            let query = query_row + first;
            let d_out = queries.d_out_rows.as_ptr().add(query * v_dim);
            let dv = gradients.dv.as_mut_ptr().add((key_row + from) * v_dim);
            add_product::<S, M, N>(rows, v_dim, steps, (p, stride, 1), d_out, dv);
            let q = queries.q_rows.as_ptr().add(query * dim);
            let dk = gradients.dk.as_mut_ptr().add((key_row + from) * dim);
            add_product::<S, M, N>(rows, dim, steps, (ds, stride, 1), q, dk);
            let k = keys.k_rows.as_ptr().add((key_row + from) * dim);
            let dq = dq.as_mut_ptr().add(query * dim);
            add_product::<S, M, N>(steps, dim, rows, (ds, 1, stride), k, dq);
        }
    }
}

/// `to[r][c] += sum over i of a[i * a_step + r * a_row] * b[i][c]`, for rows of `width` elements in b and to.
#[inline(always)]
unsafe fn add_product<S: Simd, const M: usize, const N: usize>(
    rows: usize,
    width: usize,
    steps: usize,
    (a, a_row, a_step): (*const f32, usize, usize),
    b: *const f32,
    to: *mut f32,
) {
    // SAFETY: the caller vouches for the sizes; width is a multiple of the register.
    unsafe {
        let mut column = 0;
        while column < width {
            let wide = column + N * S::LANES <= width;
            let (b, mut r) = (b.add(column), 0);
            while r < rows {
                let (a, to) = (a.add(r * a_row), to.add(r * width + column));
                r += match (wide, r + M <= rows) {
                    (true, true) => update::<S, M, N>(steps, a, a_row, a_step, b, width, to),
                    (true, false) => update::<S, 1, N>(steps, a, a_row, a_step, b, width, to),
                    (false, true) => update::<S, M, 1>(steps, a, a_row, a_step, b, width, to),
                    (false, false) => update::<S, 1, 1>(steps, a, a_row, a_step, b, width, to),
                };
            }
            column += if wide { N * S::LANES } else { S::LANES };
        }
    }
}

/// One register tile of [`add_product`]; returns its rows.
#[inline(always)]
unsafe fn update<S: Simd, const M: usize, const N: usize>(
    steps: usize,
    a: *const f32,
    a_row: usize,
    a_step: usize,
    b: *const f32,
    width: usize,
    to: *mut f32,
) -> usize {
    // SAFETY: as for `add_product`.
    unsafe {
        let mut acc = [[S::splat(0.0); N]; M];
        for (r, acc) in acc.iter_mut().enumerate() {
            for (v, acc) in acc.iter_mut().enumerate() {
                *acc = S::load(to.add(r * width + v * S::LANES));
            }
        }
        multiply::<S, M, N>(steps, a, a_row, a_step, b, width, &mut acc);
        for (r, acc) in acc.iter().enumerate() {
            for (v, acc) in acc.iter().enumerate() {
                S::store(to.add(r * width + v * S::LANES), *acc);
            }
        }
    }
    M
}
