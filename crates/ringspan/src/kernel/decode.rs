//! Decoding kernel for queries that each have many cached keys of their own: nothing is packed, and every key and value is read
//! once for its head group.
//!
//! Keys are divided into chunks that do not depend on the number of threads, and the chunks are merged in order ("flash
//! decoding", Dao et al., 2023), so any number of threads gives the same bits.

use super::buffer::{Pool, Target};
use super::dispatch::dispatch;
use super::isa::Code;
use super::micro::accumulate;
use super::pack::copy;
use super::plan::BlockPair;
use super::scaling::Scaling;
use super::terms::ScoreTerms;
use super::vector::{Simd, exp};
use super::workers::Workers;
use super::{HeadMap, Partial, Tile, View};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of key rows in a chunk.
pub(super) const CHUNK: usize = 1024;

/// Number of elements that are converted to f32 at a time, so that they stay in the L1 cache with the sums of values.
const ELEMENTS: usize = 4096;

/// Number of rows of `width` elements that are converted at a time. It divides CHUNK and is a multiple of 4.
const fn rows_at_a_time(width: usize) -> usize {
    match ELEMENTS / width {
        0..8 => 4,
        8..16 => 8,
        16..32 => 16,
        _ => 32,
    }
}

/// Maximum number of elements in a vector.
const MAX_LANES: usize = 16;

/// Whether each tile has a single query: with several, those of a tile would read the same keys again and again.
pub(super) fn has_single_queries(tiles: &[Tile]) -> bool {
    tiles.iter().all(|tile| tile.q.len() <= 1)
}

/// The tensors and parameters that all chunks of a call share; each tile has one query.
pub(super) struct Decode<'a> {
    pub(super) q: View<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    pub(super) heads: &'a HeadMap,
    pub(super) scaling: Scaling,
    pub(super) terms: Option<&'a ScoreTerms<'a>>,
}

impl Decode<'_> {
    /// Number of elements of one head's state: maximum, sum, weighted values.
    pub(super) fn state(&self) -> usize {
        2 + self.v.dim
    }

    /// Number of elements of a worker's scratch: for each head scores of a chunk, the query and the sum of values, then
    /// rows in f32.
    pub(super) fn scratch(dim: usize, v_dim: usize, group: usize) -> usize {
        let (wide, v_wide) = (dim.next_multiple_of(MAX_LANES), v_dim.next_multiple_of(MAX_LANES));
        let rows = (rows_at_a_time(wide) * wide).max(rows_at_a_time(v_wide) * v_wide);
        group * (CHUNK + wide + v_wide) + rows
    }

    /// Computes the softmax states of the heads that read `kv`, over at most CHUNK rows of `tile`, which must all be
    /// visible.
    ///
    /// This kernel does not use R and N, the shape of the packed kernels.
    ///
    /// # Safety
    /// The instruction set must be enabled, `states` have a state per head, and `scratch` its size for these heads.
    #[inline(always)]
    pub(super) unsafe fn chunk<S: Simd>(
        &self,
        simd: S,
        kv: usize,
        rows: Range<usize>,
        tile: &Tile,
        states: &mut [f32],
        scratch: &mut [f32],
    ) {
        let heads = self.heads.queries_of(kv);
        let (wide, v_wide) = (self.k.dim.next_multiple_of(MAX_LANES), self.v.dim.next_multiple_of(MAX_LANES));
        let (scores, rest) = scratch.split_at_mut(heads.len() * CHUNK);
        let (queries, rest) = rest.split_at_mut(heads.len() * wide);
        let (sums, few) = rest.split_at_mut(heads.len() * v_wide);
        copy(simd, queries, wide, self.scaling.queries, |i| Some(self.q.at(tile.q.start, heads.start + i)));
        let at_a_time = rows_at_a_time(wide);
        for from in rows.clone().step_by(at_a_time) {
            let few = &mut few[..at_a_time * wide];
            copy(simd, few, wide, 1.0, |i| (from + i < rows.end).then(|| self.k.at(from + i, kv)));
            // Rows further on are fetched while these are multiplied. Their requests are spread over the heads, since many at once would
            // fill the processor's queue of outstanding loads.
            let mut ahead = rows.end.min(from + 2 * at_a_time)..rows.end.min(from + 3 * at_a_time);
            let some = at_a_time.div_ceil(heads.len());
            for (query, scores) in queries.chunks_exact(wide).zip(scores.chunks_exact_mut(CHUNK)) {
                for row in ahead.by_ref().take(some) {
                    self.k.at(row, kv).prefetch_far();
                }
                for (four, scores) in few.chunks_exact(4 * wide).zip(scores[from - rows.start..].chunks_exact_mut(4)) {
                    // SAFETY: four rows of `wide` elements, whole vectors, and as many of the query.
                    unsafe { dots(simd, query, four.as_ptr(), wide, scores) };
                }
            }
        }
        let block_pair = BlockPair::of_query(tile, rows.start);
        let state = states.chunks_exact_mut(self.state());
        for ((scores, state), head) in scores.chunks_exact_mut(CHUNK).zip(state).zip(heads.clone()) {
            let (seen, rest) = scores.split_at_mut(rows.len());
            if self.scaling.products != 1.0 {
                seen.iter_mut().for_each(|s| *s *= self.scaling.products);
            }
            if let Some(terms) = self.terms {
                terms.score_single_query(simd, head, &block_pair, seen);
            }
            // The last vector may extend beyond the last key; exp turns these scores into exact zeros.
            let whole = rows.len().next_multiple_of(S::LANES);
            rest[..whole - rows.len()].fill(f32::NEG_INFINITY);
            let max = seen.iter().fold(f32::NEG_INFINITY, |max, x| max.max(*x));
            let finite = simd.splat(max.max(f32::MIN));
            let mut sum = simd.splat(0.0);
            for scores in scores[..whole].chunks_exact_mut(S::LANES) {
                // SAFETY: the chunk has LANES numbers.
                unsafe {
                    let x = exp(simd, simd.sub(simd.load(scores.as_ptr()), finite));
                    sum = simd.add(sum, x);
                    simd.store(scores.as_mut_ptr(), x);
                }
            }
            (state[0], state[1]) = (max, simd.sum(sum));
            if let Some(terms) = self.terms {
                terms.drop_single_query(head, &block_pair, &mut scores[..rows.len()]);
            }
        }
        sums.fill(0.0);
        let at_a_time = rows_at_a_time(v_wide);
        for from in rows.clone().step_by(at_a_time) {
            let few = &mut few[..at_a_time * v_wide];
            let depth = at_a_time.min(rows.end - from);
            copy(simd, few, v_wide, 1.0, |i| (i < depth).then(|| self.v.at(from + i, kv)));
            // Values are fetched ahead all at once, since one call multiplies them for all heads.
            for row in rows.end.min(from + 2 * at_a_time)..rows.end.min(from + 3 * at_a_time) {
                self.v.at(row, kv).prefetch_far();
            }
            let (weights, shape) = (scores[from - rows.start..].as_ptr(), (heads.len(), depth, v_wide));
            let (few, sums) = (few.as_ptr(), sums.as_mut_ptr());
            // SAFETY: the weights of heads are CHUNK apart; rows and sums have `v_wide` elements, whole vectors.
            unsafe {
                match heads.len() % 4 {
                    0 => accumulate::<S, 4>(simd, shape, weights, CHUNK, 1, few, sums),
                    2 => accumulate::<S, 2>(simd, shape, weights, CHUNK, 1, few, sums),
                    _ => accumulate::<S, 1>(simd, shape, weights, CHUNK, 1, few, sums),
                }
            }
        }
        for (state, sum) in states.chunks_exact_mut(self.state()).zip(sums.chunks_exact(v_wide)) {
            state[2..].copy_from_slice(&sum[..self.v.dim]);
        }
    }

    /// Adds the visible key rows of each tile to the state of its query.
    pub(super) fn run<'t>(
        &self,
        code: Code,
        workers: &Workers,
        pool: &Pool,
        progress: &(dyn Fn(usize) + Sync),
        visible: &[(Range<usize>, &'t Tile)],
        partial: &mut Partial,
    ) {
        let chunk = |(rows, tile): &(Range<usize>, &'t Tile)| {
            let (rows, tile) = (rows.clone(), *tile);
            rows.clone().step_by(CHUNK).map(move |from| (from..rows.end.min(from + CHUNK), tile))
        };
        let chunks: Vec<(Range<usize>, &Tile)> = visible.iter().flat_map(chunk).collect();
        let read: Vec<usize> = (0..self.k.heads).filter(|&kv| !self.heads.queries_of(kv).is_empty()).collect();
        let tasks = read.len() * chunks.len();
        if tasks == 0 {
            return;
        }
        let group = read.iter().map(|&kv| self.heads.queries_of(kv).len()).max().unwrap_or(0);
        let size = group * self.state();
        let mut states = pool.take(tasks * size);
        let target = Target::new(&mut states);
        let next = AtomicUsize::new(0);
        // Waking a thread costs about as much as reading this many numbers.
        let rows: usize = chunks.iter().map(|(rows, _)| rows.len()).sum();
        let worth = (rows * read.len() * (self.k.dim + self.v.dim)).div_ceil(1 << 19);
        workers.run(workers.count().min(tasks).min(worth), &|worker| {
            let mut scratch = pool.take(Self::scratch(self.k.dim, self.v.dim, group));
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    break;
                }
                let (kv, (rows, tile)) = (read[task / chunks.len()], chunks[task % chunks.len()].clone());
                let heads = self.heads.queries_of(kv).len();
                // SAFETY: the counter gives each task, and with it these states, to one worker.
                unsafe {
                    let states = target.row(task * size, heads * self.state());
                    decode_chunk(code, self, kv, rows, tile, states, &mut scratch);
                }
                progress(worker);
            }
            pool.give(scratch);
        });
        for task in 0..tasks {
            let (kv, (_, tile)) = (read[task / chunks.len()], &chunks[task % chunks.len()]);
            self.merge(kv, tile.q.start, &states[task * size..][..size], partial);
        }
        pool.give(states);
    }

    /// Merges the states of a chunk into the running state of a query.
    fn merge(&self, kv: usize, query: usize, states: &[f32], partial: &mut Partial) {
        let states = states.chunks_exact(self.state());
        for (head, state) in self.heads.queries_of(kv).zip(states) {
            let at = head * self.q.tokens + query;
            let max = partial.max[at].max(state[0]);
            // Subtracting a finite number avoids the NaN of -inf - (-inf).
            let finite = max.max(f32::MIN);
            let (old, new) = ((partial.max[at] - finite).exp(), (state[0] - finite).exp());
            partial.max[at] = max;
            partial.sum[at] = partial.sum[at] * old + state[1] * new;
            let out = &mut partial.out[(query * self.q.heads + head) * self.v.dim..][..self.v.dim];
            for (out, x) in out.iter_mut().zip(&state[2..]) {
                *out = *out * old + x * new;
            }
        }
    }
}

/// Computes the products of a query with four rows that are `width` long and adjacent.
///
/// # Safety
/// `rows` must be readable for four rows; `width` is a multiple of LANES and the length of the query.
#[inline(always)]
unsafe fn dots<S: Simd>(simd: S, query: &[f32], rows: *const f32, width: usize, to: &mut [f32]) {
    let mut sums = [simd.splat(0.0); 4];
    for at in (0..width).step_by(S::LANES) {
        // SAFETY: the contract of the caller.
        unsafe {
            let q = simd.load(query.as_ptr().add(at));
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = simd.fma(q, simd.load(rows.add(i * width + at)), *sum);
            }
        }
    }
    for i in 0..4 {
        to[i] = simd.sum(sums[i]);
    }
}

dispatch!(
    decode_chunk,
    Decode<'_>,
    chunk<[], [], []>(kv: usize, rows: Range<usize>, tile: &Tile, states: &mut [f32], scratch: &mut [f32]),
    "[`Decode::chunk`] compiled for `isa`."
);
