//! The blocked forward kernel: lanes are queries, so that softmax needs no sum across a register.
//!
//! Per key-value head, keys are packed in panels of rows and values in panels of columns, once for all query heads that
//! read them. A panel of queries then walks its visible keys in blocks: scores, running maximum, exponentials, and
//! `out = alpha * out + V^T P`, with `out` kept transposed until the panel is done.

use super::pack::{Segments, by_column, by_panel, transposed};
use super::simd::{PANEL_VECTORS, Simd, exp2, multiply};
use super::{HeadMap, Partial, Score, Tile, View};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Keys of a block: scores of one panel against it stay in the first-level cache.
const KEY_BLOCK: usize = 128;

/// A panel of queries of one head.
struct Task<'a> {
    head: usize,
    queries: Range<usize>,
    /// First row of the tiles' query range.
    origin: usize,
    tiles: &'a [&'a Tile],
}

/// Where results go; tasks of one call write disjoint rows.
#[derive(Clone, Copy)]
struct Output {
    out: *mut f32,
    max: *mut f32,
    sum: *mut f32,
}

// SAFETY: each task writes the rows of its own queries and head only, and `run` gives no two tasks the same.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

/// Packed keys and values of one head.
struct Packed {
    segments: Segments,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// Accumulates the key block into `partial`.
///
/// # Safety
/// The processor must have the instructions of `S`, and `R` must be `S::ROWS`.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // Three tensors, what is visible, and where it goes.
pub(super) unsafe fn run<S: Simd, const R: usize>(
    threads: usize,
    q: View,
    k: View,
    v: View,
    heads: &HeadMap,
    tiles: &[Tile],
    score: &Score,
    partial: &mut Partial,
) {
    let mut by_queries: BTreeMap<(usize, usize), Vec<&Tile>> = BTreeMap::new();
    for tile in tiles.iter().filter(|tile| !tile.q.is_empty() && !tile.k.is_empty()) {
        by_queries.entry((tile.q.start, tile.q.end)).or_default().push(tile);
    }
    // Query ranges that overlap without being equal would share rows: those run one after the other.
    let mut end = 0;
    let disjoint = by_queries.keys().all(|&(start, stop)| {
        let apart = start >= end;
        end = stop.max(end);
        apart
    });
    let threads = if disjoint { threads } else { 1 };
    let output = Output { out: partial.out.as_mut_ptr(), max: partial.max.as_mut_ptr(), sum: partial.sum.as_mut_ptr() };
    for kv_head in 0..k.heads {
        let segments = Segments::of_keys(tiles, R);
        let keys = by_panel(&k, kv_head, &segments, R);
        let values = by_column(&v, kv_head, &segments, R);
        let packed = Packed { segments, k: keys, v: values };
        let mut tasks = Vec::new();
        for (&(start, stop), tiles) in &by_queries {
            for first in (start..stop).step_by(S::PANEL) {
                let queries = first..(first + S::PANEL).min(stop);
                let task = |head| Task { head, queries: queries.clone(), origin: start, tiles };
                tasks.extend(heads.readers(kv_head).map(task));
            }
        }
        // Late queries see most: first, so that no thread is left with them at the end.
        tasks.reverse();
        let next = AtomicUsize::new(0);
        let work = || {
            let mut scratch = Scratch::new::<S, R>(q.dim, v.dim);
            while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                // SAFETY: S and R are the caller's; rows of distinct tasks are disjoint or threads is 1.
                unsafe { panel::<S, R>(task, &q, &v, &packed, score, &mut scratch, output) };
            }
        };
        super::spread(threads.min(tasks.len()), work);
    }
}

/// Buffers of one thread.
struct Scratch {
    /// Scaled queries, `[D][PANEL]`.
    q: Vec<f32>,
    /// Scores and then weights of a block, `[KEY_BLOCK][PANEL]`.
    s: Vec<f32>,
    /// Output, `[Dv padded][PANEL]`.
    out: Vec<f32>,
}

impl Scratch {
    fn new<S: Simd, const R: usize>(dim: usize, v_dim: usize) -> Self {
        Self {
            q: vec![0.0; dim * S::PANEL],
            s: vec![0.0; KEY_BLOCK * S::PANEL],
            out: vec![0.0; v_dim.next_multiple_of(R) * S::PANEL],
        }
    }
}

/// Elements that one call allocates: packed keys and values of a head, and each thread's scratch.
pub(super) fn workspace<S: Simd>(threads: usize, q: &View, v: &View, tiles: &[Tile]) -> usize {
    let rows = Segments::of_keys(tiles, S::ROWS).rows;
    let v_padded = v.dim.next_multiple_of(S::ROWS);
    rows * (q.dim + v_padded) + threads * S::PANEL * (q.dim + v_padded + KEY_BLOCK)
}

#[inline(always)]
unsafe fn panel<S: Simd, const R: usize>(
    task: &Task,
    q: &View,
    v: &View,
    packed: &Packed,
    score: &Score,
    scratch: &mut Scratch,
    output: Output,
) {
    let (queries, head, width) = (task.queries.clone(), task.head, S::PANEL);
    let factor = score.scale * std::f32::consts::LOG2_E;
    transposed(q, head, queries.clone(), width, factor, &mut scratch.q);
    let statistics = head * q.tokens + queries.start;
    // SAFETY: output's pointers cover all rows and heads of the queries; scratch has the sizes of `Scratch::new`; the
    // packed copies have `segments.rows` rows, and visible keys lie inside their segment.
    unsafe {
        let mut max = [S::splat(f32::NEG_INFINITY); PANEL_VECTORS];
        let mut sum = [S::splat(0.0); PANEL_VECTORS];
        load_lanes::<S>(&mut max, output.max.add(statistics), queries.len(), f32::NEG_INFINITY);
        load_lanes::<S>(&mut sum, output.sum.add(statistics), queries.len(), 0.0);
        let row = |lane: usize| output.out.add(((queries.start + lane) * q.heads + head) * v.dim);
        scratch.out.fill(0.0);
        for lane in 0..queries.len() {
            for d in 0..v.dim {
                *scratch.out.get_unchecked_mut(d * width + lane) = *row(lane).add(d);
            }
        }

        for tile in task.tiles {
            let (n, m) = (queries.len(), tile.k.len());
            let first_query = queries.start - task.origin;
            let start = tile.band.keys(first_query, m).start / R * R;
            let stop = tile.band.keys(first_query + n - 1, m).end;
            let packed_row = packed.segments.row(&tile.k);
            let mut from = start;
            while from < stop {
                let to = (from + KEY_BLOCK).min(stop.next_multiple_of(R));
                let keys = packed.k.as_ptr().add((packed_row + from) * q.dim);
                let block = Block { tile, first_query, queries: n, from, to };
                let greatest = scores::<S, R>(&block, q.dim, keys, scratch);
                let mut alpha = [S::splat(0.0); PANEL_VECTORS];
                let mut base = alpha;
                for i in 0..PANEL_VECTORS {
                    let new = S::max(max[i], greatest[i]);
                    // A row that has seen nothing has -inf here; any finite base makes its weights 0 and not NaN.
                    base[i] = S::max(S::splat(-1e30), new);
                    alpha[i] = exp2::<S>(S::sub(max[i], base[i]));
                    max[i] = new;
                    sum[i] = S::mul(sum[i], alpha[i]);
                }
                for row in 0..to - from {
                    let at = scratch.s.as_mut_ptr().add(row * width);
                    for i in 0..PANEL_VECTORS {
                        let weight = exp2::<S>(S::sub(S::load(at.add(i * S::LANES)), base[i]));
                        sum[i] = S::add(sum[i], weight);
                        S::store(at.add(i * S::LANES), weight);
                    }
                }
                for column in 0..v.dim.div_ceil(R) {
                    let values = packed.v.as_ptr().add((column * packed.segments.rows + packed_row + from) * R);
                    let out = scratch.out.as_mut_ptr().add(column * R * width);
                    let mut acc = [[S::splat(0.0); PANEL_VECTORS]; R];
                    for (r, acc) in acc.iter_mut().enumerate() {
                        for (i, acc) in acc.iter_mut().enumerate() {
                            *acc = S::mul(alpha[i], S::load(out.add(r * width + i * S::LANES)));
                        }
                    }
                    multiply::<S, R, PANEL_VECTORS>(to - from, values, 1, R, scratch.s.as_ptr(), width, &mut acc);
                    for (r, acc) in acc.iter().enumerate() {
                        for (i, acc) in acc.iter().enumerate() {
                            S::store(out.add(r * width + i * S::LANES), *acc);
                        }
                    }
                }
                from = to;
            }
        }

        for lane in 0..queries.len() {
            for d in 0..v.dim {
                *row(lane).add(d) = *scratch.out.get_unchecked(d * width + lane);
            }
        }
        store_lanes::<S>(&max, output.max.add(statistics), queries.len());
        store_lanes::<S>(&sum, output.sum.add(statistics), queries.len());
    }
}

/// Keys `from..to` of a tile (`to` may reach into the padding of the last panel) for queries from `first_query`.
pub(super) struct Block<'a> {
    pub(super) tile: &'a Tile,
    pub(super) first_query: usize,
    pub(super) queries: usize,
    pub(super) from: usize,
    pub(super) to: usize,
}

impl Block<'_> {
    /// Whether all queries see all of `rows` keys from `key`.
    pub(super) fn sees_all(&self, key: usize, rows: usize) -> bool {
        let band = self.tile.band;
        let (first, last) = (self.first_query as i64, (self.first_query + self.queries - 1) as i64);
        let (start, end) = (key as i64, (key + rows - 1) as i64);
        key + rows <= self.tile.k.len() && first - end >= band.lo && last - start <= band.hi
    }

    /// The lanes that see `key`, as bounds that may lie outside the panel: an empty range if none.
    pub(super) fn lanes(&self, key: usize) -> (f32, f32) {
        if key >= self.tile.k.len() {
            return (1.0, 0.0);
        }
        let distance = key as i64 - self.first_query as i64;
        // Panels are far narrower than this, and f32 counts it exactly.
        let bound = |x: i64| x.clamp(-(1 << 20), 1 << 20) as f32;
        (bound(self.tile.band.lo.saturating_add(distance)), bound(self.tile.band.hi.saturating_add(distance)))
    }
}

/// Scores of a block into `scratch.s`, -inf where nothing is seen, and their maximum by lane.
#[inline(always)]
unsafe fn scores<S: Simd, const R: usize>(
    block: &Block,
    dim: usize,
    keys: *const f32,
    scratch: &mut Scratch,
) -> [S::V; PANEL_VECTORS] {
    let width = S::PANEL;
    // SAFETY: `keys` holds `to - from` packed rows, scratch.q `dim` rows and scratch.s `to - from` rows of a panel.
    unsafe {
        let hidden = S::splat(f32::NEG_INFINITY);
        let mut greatest = [hidden; PANEL_VECTORS];
        for key in (block.from..block.to).step_by(R) {
            let rows = key - block.from;
            let mut acc = [[S::splat(0.0); PANEL_VECTORS]; R];
            multiply::<S, R, PANEL_VECTORS>(dim, keys.add(rows * dim), 1, R, scratch.q.as_ptr(), width, &mut acc);
            let all = block.sees_all(key, R);
            for (r, acc) in acc.iter_mut().enumerate() {
                if !all {
                    let (first, last) = block.lanes(key + r);
                    for (i, acc) in acc.iter_mut().enumerate() {
                        let before = (i * S::LANES) as f32;
                        *acc = S::within(*acc, first - before, last - before, hidden);
                    }
                }
                for (i, acc) in acc.iter().enumerate() {
                    greatest[i] = S::max(greatest[i], *acc);
                    S::store(scratch.s.as_mut_ptr().add((rows + r) * width + i * S::LANES), *acc);
                }
            }
        }
        greatest
    }
}

/// The first `n` of a panel's lanes from memory, `rest` in the others.
#[inline(always)]
pub(super) unsafe fn load_lanes<S: Simd>(to: &mut [S::V; PANEL_VECTORS], from: *const f32, n: usize, rest: f32) {
    let mut lanes = [rest; 64];
    // SAFETY: the caller vouches for n elements; a panel has at most 48 lanes.
    unsafe {
        std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), n);
        for (i, to) in to.iter_mut().enumerate() {
            *to = S::load(lanes.as_ptr().add(i * S::LANES));
        }
    }
}

#[inline(always)]
unsafe fn store_lanes<S: Simd>(from: &[S::V; PANEL_VECTORS], to: *mut f32, n: usize) {
    let mut lanes = [0.0; 64];
    // SAFETY: the caller vouches for n elements; a panel has at most 48 lanes.
    unsafe {
        for (i, from) in from.iter().enumerate() {
            S::store(lanes.as_mut_ptr().add(i * S::LANES), *from);
        }
        std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, n);
    }
}
