//! Finds which keys of a block are computed for which queries of a block: for all of them, for a vector of them, or for
//! one.

use super::plan::{Plan, TilePart};
use super::terms::{Bounds, LANES};
use std::ops::Range;

/// The keys of a block that a block of queries in N vectors sees, numbered from the first key of the block.
pub(super) struct VisibleKeys<const N: usize> {
    /// For each query, the start and end of the keys it sees; zeros where no query needs a mask.
    pub(super) bounds: Bounds,
    /// For each vector of queries, the keys that are computed for it.
    pub(super) spans: [Range<usize>; N],
    /// The keys that are computed for all vectors; those before and after them are computed for each vector alone.
    pub(super) common: Range<usize>,
}

impl<const N: usize> VisibleKeys<N> {
    /// All vectors compute all `keys` keys.
    #[inline(always)]
    pub(super) fn all(keys: usize) -> Self {
        let bounds = ([0.0; LANES], [0.0; LANES]);
        Self { bounds, spans: std::array::from_fn(|_| 0..keys), common: 0..keys }
    }

    /// Finds the keys that each query sees among the `keys` keys from row `base` on.
    #[inline(always)]
    pub(super) fn find_bounds(
        &mut self,
        plan: &Plan,
        block: usize,
        part: &TilePart,
        base: usize,
        keys: usize,
        lanes: usize,
    ) {
        let (low, high) = &mut self.bounds;
        plan.bounds(block, part, base, keys, &mut low[..lanes], &mut high[..lanes]);
    }

    /// Leaves out, for each vector of `lanes` queries, the keys that none of its queries sees, in multiples of `rows`.
    /// The bounds must have been found.
    #[inline(always)]
    pub(super) fn skip_hidden(&mut self, lanes: usize, rows: usize) {
        let (low, high) = &self.bounds;
        self.spans = std::array::from_fn(|v| {
            let (mut start, mut end) = (f32::INFINITY, 0.0f32);
            for lane in v * lanes..(v + 1) * lanes {
                if low[lane] < high[lane] {
                    (start, end) = (start.min(low[lane]), end.max(high[lane]));
                }
            }
            let end = (end as usize).next_multiple_of(rows);
            // Without any key the range is empty: the infinite start is limited to `end`.
            (start as usize).min(end) / rows * rows..end
        });
        let start = self.spans.iter().map(|span| span.start).max().unwrap_or(0);
        self.common = start..self.spans.iter().map(|span| span.end).min().unwrap_or(0).max(start);
    }

    /// The vectors from the first to the last that computes `key`.
    #[inline(always)]
    pub(super) fn vectors_seeing(&self, key: usize) -> Range<usize> {
        let first = self.spans.iter().position(|span| span.contains(&key)).unwrap_or(0);
        first..self.spans.iter().rposition(|span| span.contains(&key)).map_or(0, |last| last + 1)
    }
}
