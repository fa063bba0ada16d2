//! Copies of rows in the order in which the micro kernels read them. Done once per head, shared by all queries.

use super::{Tile, View};
use std::collections::BTreeMap;
use std::ops::Range;

/// The distinct ranges of rows that tiles read; each starts at a multiple of the panel in the packed copy.
pub(super) struct Segments {
    /// First packed row of each range.
    first: BTreeMap<(usize, usize), usize>,
    /// Packed rows, padding included.
    pub(super) rows: usize,
}

impl Segments {
    pub(super) fn of_keys(tiles: &[Tile], panel: usize) -> Self {
        Self::new(tiles.iter().map(|tile| &tile.k), panel)
    }

    pub(super) fn of_queries(tiles: &[Tile], panel: usize) -> Self {
        Self::new(tiles.iter().map(|tile| &tile.q), panel)
    }

    fn new<'a>(ranges: impl Iterator<Item = &'a Range<usize>>, panel: usize) -> Self {
        let mut first: BTreeMap<(usize, usize), usize> = ranges.map(|range| ((range.start, range.end), 0)).collect();
        let mut rows = 0;
        for (&(start, end), at) in &mut first {
            *at = rows;
            rows += (end - start).next_multiple_of(panel);
        }
        Self { first, rows }
    }

    /// First packed row of one of the ranges.
    pub(super) fn row(&self, range: &Range<usize>) -> usize {
        self.first.get(&(range.start, range.end)).copied().unwrap_or_default()
    }

    /// Ranges of rows, and where they are packed.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        self.first.iter().map(|(&(start, end), &at)| (start..end, at))
    }
}

/// Rows in panels of `panel`: `[rows / panel][dim][panel]`, zero behind the end of each segment.
pub(super) fn by_panel(view: &View, head: usize, segments: &Segments, panel: usize) -> Vec<f32> {
    let mut packed = vec![0.0; segments.rows * view.dim];
    for (range, at) in segments.iter() {
        for (i, token) in range.enumerate() {
            let row = at + i;
            let base = (row / panel) * panel * view.dim + row % panel;
            for (d, &x) in view.row(token, head).iter().enumerate() {
                packed[base + d * panel] = x;
            }
        }
    }
    packed
}

/// Columns in panels of `panel`: `[dim / panel][rows][panel]`, zero behind the last column and behind each segment.
pub(super) fn by_column(view: &View, head: usize, segments: &Segments, panel: usize) -> Vec<f32> {
    let columns = view.dim.div_ceil(panel);
    let mut packed = vec![0.0; columns * segments.rows * panel];
    for (range, at) in segments.iter() {
        for (i, token) in range.enumerate() {
            for (c, chunk) in view.row(token, head).chunks(panel).enumerate() {
                let base = (c * segments.rows + at + i) * panel;
                packed[base..base + chunk.len()].copy_from_slice(chunk);
            }
        }
    }
    packed
}

/// Rows as they are, with `width >= dim` elements each, zero behind the last.
pub(super) fn by_row(view: &View, head: usize, segments: &Segments, width: usize) -> Vec<f32> {
    let mut packed = vec![0.0; segments.rows * width];
    for (range, at) in segments.iter() {
        for (i, token) in range.enumerate() {
            packed[(at + i) * width..][..view.dim].copy_from_slice(view.row(token, head));
        }
    }
    packed
}

/// Rows `tokens` of a head as columns: `[dim][panel]`, times `factor`, zero behind the last token.
pub(super) fn transposed(view: &View, head: usize, tokens: Range<usize>, panel: usize, factor: f32, out: &mut [f32]) {
    if tokens.len() < panel {
        out.fill(0.0);
    }
    for (lane, token) in tokens.enumerate() {
        for (d, &x) in view.row(token, head).iter().enumerate() {
            out[d * panel + lane] = x * factor;
        }
    }
}
