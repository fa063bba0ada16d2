//! Decoding kernel for queries that each have many cached keys of their own: nothing is packed, and every key and value is read
//! once for its head group.
//!
//! Keys are divided into chunks that do not depend on the number of threads, and the chunks are merged in order ("flash
//! decoding", Dao et al., 2023), so any number of threads gives the same bits.

mod head_ranges;
mod rows;
mod run;

use super::buffer::lines;
use super::dispatch::dispatch;
use super::pack::copy;
use super::plan::BlockPair;
use super::scaling::Scaling;
use super::terms::ScoreTerms;
use super::vector::{Simd, exp};
use super::{HeadMap, Tile, View};
use head_ranges::{HeadRange, TASKS_PER_WORKER, head_ranges};
use rows::{KvRows, Prefetch};
use std::ops::Range;

/// Maximum number of key rows in a chunk.
const CHUNK: usize = 1024;

/// Least number of key rows in a chunk, except the last: smaller chunks are not worth a task.
const LEAST_CHUNK: usize = 128;

/// A query's keys are divided into at most this many chunks, enough for several threads, unless a chunk would then have more than
/// CHUNK rows.
const CHUNKS: usize = 8;

/// Number of key rows in a chunk, for a query that sees `rows` keys; the last chunk may have fewer.
fn chunk_rows(rows: usize) -> usize {
    rows.div_ceil(CHUNKS).next_multiple_of(ROWS).clamp(LEAST_CHUNK, CHUNK)
}

/// The largest number of chunks of a query that sees at most `rows` keys.
pub(super) fn most_chunks(rows: usize) -> usize {
    rows.div_ceil(LEAST_CHUNK).min(CHUNKS).max(rows.div_ceil(CHUNK))
}

/// Maximum number of elements in a vector.
const MAX_LANES: usize = 16;

/// Number of rows of a head that are read at a time: a multiple of the vectors' lengths that divides all chunks but the last. Rows that
/// reach from one page of a cache into another are copied, so pages should be several times larger.
const ROWS: usize = MAX_LANES;

/// How far ahead of the reads memory is prefetched, in elements of all heads together. On Zen 4, half of this distance was as fast, and
/// twice this distance slower.
const PREFETCH_DISTANCE: usize = 8192;

/// The same distance in rows is at most this, so that chunks with few rows are prefetched, too.
const MAX_PREFETCH_ROWS: usize = 64;

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

    /// Number of elements of a worker's scratch: for each of `heads` heads scores of a chunk, the query, the sum of values and the
    /// state of a chunk, then rows in f32.
    pub(super) fn scratch(dim: usize, v_dim: usize, heads: usize) -> usize {
        let (wide, v_wide) = (dim.next_multiple_of(MAX_LANES), v_dim.next_multiple_of(MAX_LANES));
        heads * (CHUNK + wide + v_wide + 2 + v_dim) + ROWS * wide.max(v_wide)
    }

    /// Upper bound on the number of elements that a call holds which reads rows of `dim` and `v_dim` elements in at most `chunks` chunks.
    pub(super) fn workspace(heads: &HeadMap, (dim, v_dim): (usize, usize), chunks: usize, workers: usize) -> usize {
        // With fewer chunks there are more ranges of heads, which need not be equal.
        let divided = (1..=chunks.min(TASKS_PER_WORKER * workers)).chain([chunks]).map(|chunks| {
            let ranges = head_ranges(heads, chunks, workers);
            let most = ranges.iter().map(|range| range.heads().len()).max().unwrap_or(0);
            (chunks * ranges.len() * most * (2 + v_dim), Self::scratch(dim, v_dim, most))
        });
        let (states, scratch) = divided.fold((0, 0), |a, b| (a.0.max(b.0), a.1.max(b.1)));
        lines(states) + workers.min(heads.kv_heads() * chunks) * lines(scratch)
    }

    /// Computes the softmax states of the heads of `range`, over at most CHUNK rows of `tile`, which must all be visible.
    ///
    /// This kernel does not use R and N, the shape of the packed kernels.
    ///
    /// # Safety
    /// The instruction set must be enabled, `states` have a state per head, and `scratch` its size for these heads.
    #[inline(always)]
    pub(super) unsafe fn chunk<S: Simd>(
        &self,
        simd: S,
        range: &HeadRange,
        rows: Range<usize>,
        tile: &Tile,
        states: &mut [f32],
        scratch: &mut [f32],
    ) {
        let heads = range.heads();
        let (wide, v_wide) = (self.k.dim.next_multiple_of(MAX_LANES), self.v.dim.next_multiple_of(MAX_LANES));
        let (scores, rest) = scratch.split_at_mut(heads.len() * CHUNK);
        let (queries, rest) = rest.split_at_mut(heads.len() * wide);
        let (sums, copies) = rest.split_at_mut(heads.len() * v_wide);
        copy(simd, queries, wide, self.scaling.queries, |i| Some(self.q.at(tile.q.start, heads.start + i)));
        for (here, next) in rows_at_a_time(&rows, range.kv.len() * wide) {
            // After the last keys come the first values.
            let ahead = match next < rows.end {
                true => prefetch(&self.k, next..rows.end),
                false => prefetch(&self.v, (next - rows.len()).min(rows.end)..rows.end),
            };
            for (kv, own) in range.groups() {
                let keys = KvRows::new(simd, &self.k, (kv, wide), here.clone(), ahead.clone(), copies);
                let scores = &mut scores[own.start * CHUNK + here.start - rows.start..];
                keys.score(simd, &queries[own.start * wide..own.end * wide], scores);
            }
        }
        let block_pair = BlockPair::of_query(tile, rows.start);
        let state = states.chunks_exact_mut(self.state());
        for ((scores, state), head) in scores.chunks_exact_mut(CHUNK).zip(state).zip(heads) {
            (state[0], state[1]) = self.exponentiate(simd, head, &block_pair, rows.len(), scores);
        }
        sums.fill(0.0);
        for (here, next) in rows_at_a_time(&rows, range.kv.len() * v_wide) {
            // After the last values come keys of the next chunk, which this worker or another one reads.
            let ahead = match next < rows.end {
                true => prefetch(&self.v, next..rows.end),
                false => prefetch(&self.k, next.min(tile.k.end)..tile.k.end),
            };
            for (kv, own) in range.groups() {
                let values = KvRows::new(simd, &self.v, (kv, v_wide), here.clone(), ahead.clone(), copies);
                let weights = &scores[own.start * CHUNK + here.start - rows.start..];
                values.add_weighted(simd, weights, &mut sums[own.start * v_wide..own.end * v_wide]);
            }
        }
        for (state, sum) in states.chunks_exact_mut(self.state()).zip(sums.chunks_exact(v_wide)) {
            state[2..].copy_from_slice(&sum[..self.v.dim]);
        }
    }

    /// Replaces the first `rows` scores of a head by the exponentials of their differences to their maximum, and scores up to the next
    /// multiple of ROWS by 0. Returns the maximum and the sum of the exponentials.
    #[inline(always)]
    fn exponentiate<S: Simd>(
        &self,
        simd: S,
        head: usize,
        block_pair: &BlockPair,
        rows: usize,
        scores: &mut [f32],
    ) -> (f32, f32) {
        let (seen, rest) = scores.split_at_mut(rows);
        if self.scaling.products != 1.0 {
            seen.iter_mut().for_each(|s| *s *= self.scaling.products);
        }
        if let Some(terms) = self.terms {
            terms.score_single_query(simd, head, block_pair, seen);
        }
        // The last rows that are read at a time may extend beyond the last key; exp turns their scores into exact zeros.
        let whole = rows.next_multiple_of(ROWS);
        rest[..whole - rows].fill(f32::NEG_INFINITY);
        let mut most = simd.splat(f32::NEG_INFINITY);
        for scores in scores[..whole].chunks_exact(S::LANES) {
            // SAFETY: the chunk has LANES numbers.
            most = simd.max(unsafe { simd.load(scores.as_ptr()) }, most);
        }
        let mut lanes = [f32::NEG_INFINITY; MAX_LANES];
        // SAFETY: no vector has more than MAX_LANES numbers.
        unsafe { simd.store(lanes.as_mut_ptr(), most) };
        let max = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
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
        if let Some(terms) = self.terms {
            terms.drop_single_query(head, block_pair, &mut scores[..rows]);
        }
        (max, simd.sum(sum))
    }
}

/// Divides rows of `width` elements, all heads together, into those that are read at a time, each with the first row that is fetched
/// from memory meanwhile; this may lie beyond the end.
fn rows_at_a_time(rows: &Range<usize>, width: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
    let (end, ahead) =
        (rows.end, (PREFETCH_DISTANCE / width.max(1)).next_multiple_of(ROWS).clamp(ROWS, MAX_PREFETCH_ROWS));
    rows.clone().step_by(ROWS).map(move |from| (from..end.min(from + ROWS), from + ahead))
}

/// Asks for the first ROWS of these tokens to be prefetched.
fn prefetch<'v, 'a>(view: &'v View<'a>, tokens: Range<usize>) -> Prefetch<'v, 'a> {
    Prefetch { view, tokens: tokens.start..tokens.end.min(tokens.start + ROWS) }
}

dispatch!(
    decode_chunk,
    Decode<'_>,
    chunk<[], [], []>(range: &HeadRange, rows: Range<usize>, tile: &Tile, states: &mut [f32], scratch: &mut [f32]),
    "Calls [`Decode::chunk`] compiled for the instruction set of `features`."
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_as_many_as_is_planned_for_and_have_rows_to_read_at_a_time() {
        for rows in 1..20_000 {
            let each = chunk_rows(rows);
            assert!(each.is_multiple_of(ROWS) && each <= CHUNK, "{rows}: {each}");
            assert!(rows.div_ceil(each) <= most_chunks(rows), "{rows}: {each}");
            assert!(most_chunks(rows - 1) <= most_chunks(rows), "{rows}");
        }
    }

    #[test]
    fn ranges_of_heads_cover_each_head_once_and_are_few_for_long_texts() {
        let map = HeadMap::new(vec![1, 1, 1, 2, 4, 4, 6], 7).expect("in order");
        for (chunks, workers, most) in [(1, 1, 1), (1, 2, 7), (3, 2, 3), (8, 2, 1), (100, 1, 1), (0, 2, 7)] {
            let ranges = head_ranges(&map, chunks, workers);
            assert!(ranges.len() <= most, "{chunks} chunks, {workers} workers: {} ranges", ranges.len());
            let heads: Vec<usize> = ranges.iter().flat_map(HeadRange::heads).collect();
            assert_eq!(heads, [0, 1, 2, 3, 4, 5, 6]);
            for range in &ranges {
                for (kv, own) in range.groups() {
                    assert_eq!(range.heads().start + own.start..range.heads().start + own.end, map.queries_of(kv));
                }
            }
        }
    }
}
