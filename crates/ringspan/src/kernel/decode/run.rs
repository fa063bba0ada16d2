//! Division of a decoding call among workers, and the order in which softmax states are merged.

use super::super::buffer::{BufferPool, Target};
use super::super::isa::TargetFeatures;
use super::super::workers::Workers;
use super::super::{OnlineSoftmax, Tile};
use super::head_ranges::{HeadRange, TASKS_PER_WORKER, head_ranges};
use super::{Decode, chunk_rows, decode_chunk};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Consecutive chunks of one tile's keys, which one task reads.
struct Span {
    /// Number of the tile.
    tile: usize,
    rows: Range<usize>,
    /// Number of rows in a chunk.
    chunk_rows: usize,
}

/// The spans of tiles, each with the rows that are visible: if even the longest tile is a small part of a worker's share, each tile is one
/// span; otherwise each chunk is one.
fn spans(visible: &[(Range<usize>, &Tile)], workers: usize) -> Vec<Span> {
    let longest = visible.iter().map(|(rows, _)| rows.len()).max().unwrap_or(0);
    let all: usize = visible.iter().map(|(rows, _)| rows.len()).sum();
    let is_whole = longest * TASKS_PER_WORKER * workers <= all;
    let of_tile = |(tile, (rows, _)): (usize, &(Range<usize>, &Tile))| {
        let (rows, chunk_rows) = (rows.clone(), chunk_rows(rows.len()));
        let of_span = if is_whole { rows.len().max(1) } else { chunk_rows };
        let firsts = rows.clone().step_by(of_span);
        firsts.map(move |from| Span { tile, rows: from..rows.end.min(from + of_span), chunk_rows })
    };
    let mut spans: Vec<Span> = visible.iter().enumerate().flat_map(of_tile).collect();
    if is_whole {
        // The shortest are left for the end, when some workers may have nothing else to do.
        spans.sort_by_key(|span| std::cmp::Reverse(span.rows.len()));
    }
    spans
}

impl Decode<'_> {
    /// Adds the visible key rows of each tile to the state of its query.
    pub(in super::super) fn run(
        &self,
        features: TargetFeatures,
        workers: &Workers,
        pool: &BufferPool,
        progress: &(dyn Fn(usize) + Sync),
        visible: &[(Range<usize>, &Tile)],
        partial: &mut OnlineSoftmax,
    ) {
        let spans = spans(visible, workers.count());
        let ranges = head_ranges(self.heads, spans.len(), workers.count());
        let heads = ranges.iter().map(|range| range.heads().len()).max().unwrap_or(0);
        let tasks = ranges.len() * spans.len();
        if tasks == 0 {
            return;
        }
        let size = heads * self.state();
        let mut states = pool.take(tasks * size);
        let target = Target::new(&mut states);
        let next = AtomicUsize::new(0);
        // Waking a thread costs about as much as reading this many numbers.
        let rows: usize = spans.iter().map(|span| span.rows.len()).sum();
        let kv_heads: usize = ranges.iter().map(|range| range.groups().count()).sum();
        let worth = (rows * kv_heads * (self.k.dim + self.v.dim)).div_ceil(1 << 17);
        workers.run(workers.count().min(tasks).min(worth), &|worker| {
            let mut scratch = pool.take(Self::scratch(self.k.dim, self.v.dim, heads));
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    break;
                }
                let (range, span) = (&ranges[task % ranges.len()], &spans[task / ranges.len()]);
                // SAFETY: the counter gives each task, and with it these states, to one worker.
                let states = unsafe { target.row(task * size, range.heads().len() * self.state()) };
                self.compute(features, range, span, visible[span.tile].1, states, &mut scratch);
                progress(worker);
            }
            pool.give(scratch);
        });
        let mut of_tiles: Vec<usize> = (0..spans.len()).collect();
        of_tiles.sort_by_key(|span| spans[*span].tile);
        for own in of_tiles.chunk_by(|a, b| spans[*a].tile == spans[*b].tile) {
            let query = visible[spans[own[0]].tile].1.q.start;
            for (index, range) in ranges.iter().enumerate() {
                let len = range.heads().len() * self.state();
                let at = |span: usize| (span * ranges.len() + index) * size;
                for span in &own[1..] {
                    let (before, later) = states.split_at_mut(at(*span));
                    self.merge(&mut before[at(own[0])..][..len], &later[..len]);
                }
                self.merge_into(partial, range.heads(), query, &states[at(own[0])..][..len]);
            }
        }
        pool.give(states);
    }

    /// Computes the states of the heads of `range` over the chunks of a span, merged in order.
    fn compute(
        &self,
        features: TargetFeatures,
        range: &HeadRange,
        span: &Span,
        tile: &Tile,
        states: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (chunk_states, scratch) = scratch.split_at_mut(states.len());
        for from in span.rows.clone().step_by(span.chunk_rows) {
            let rows = from..span.rows.end.min(from + span.chunk_rows);
            let is_first = from == span.rows.start;
            let to = if is_first { &mut *states } else { &mut *chunk_states };
            // SAFETY: the code is that of the machine, and the buffers have a state for each head of the range and its scratch.
            unsafe { decode_chunk(features, self, range, rows, tile, to, scratch) };
            if !is_first {
                self.merge(states, chunk_states);
            }
        }
    }

    /// Merges states with those of later rows.
    fn merge(&self, states: &mut [f32], later: &[f32]) {
        let size = self.state();
        for (state, later) in states.chunks_exact_mut(size).zip(later.chunks_exact(size)) {
            let ((head, out), (later, added)) = (state.split_at_mut(2), later.split_at(2));
            let [max, sum] = head else { continue };
            merge_head([max, sum], out, later, added);
        }
    }

    /// Merges the states of heads with the running states of a query.
    fn merge_into(&self, partial: &mut OnlineSoftmax, heads: Range<usize>, query: usize, states: &[f32]) {
        for (head, state) in heads.zip(states.chunks_exact(self.state())) {
            let at = head * self.q.tokens + query;
            let out = &mut partial.out[(query * self.q.heads + head) * self.v.dim..][..self.v.dim];
            let (later, added) = state.split_at(2);
            merge_head([&mut partial.max[at], &mut partial.sum[at]], out, later, added);
        }
    }
}

/// Merges the maximum, sum and weighted values of a head with those of later rows.
fn merge_head([max, sum]: [&mut f32; 2], out: &mut [f32], later: &[f32], added: &[f32]) {
    let most = max.max(later[0]);
    // Subtracting a finite number avoids the NaN of -inf - (-inf).
    let finite = most.max(f32::MIN);
    let (old, new) = ((*max - finite).exp(), (later[0] - finite).exp());
    *max = most;
    *sum = *sum * old + later[1] * new;
    for (out, x) in out.iter_mut().zip(added) {
        *out = *out * old + x * new;
    }
}
