//! The cells of the square of queries and keys: visible pairs as polygons.

use super::Point;
use crate::documents::Strand;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::mask::Band;
use crate::schedule::{Pass, Schedule};

/// Maximum number of cells; more would make neither a readable picture nor a small file.
const MOST_CELLS: u64 = 20_000;

/// A region of the square of queries and keys that one ring rank computes in one step.
///
/// Query i is the row from y = i to i + 1 of the square, and key j the column from x = j to j + 1; i and j count tokens of
/// the flat batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    /// The ring rank that computes the cell.
    pub rank: usize,
    /// The step of that rank's forward plan, counted from 0.
    pub step: usize,
    /// Number of visible pairs.
    pub pairs: u64,
    /// Key and query of the tile's first pair.
    origin: (usize, usize),
    /// Number of queries and keys of the tile.
    size: (usize, usize),
    band: Band,
}

impl Cell {
    /// The border as points (x, y), clockwise from the first visible key of the first query that sees any.
    ///
    /// If `exact`, the border follows every pair. Otherwise a slanted side is one line through the middles of its stairs,
    /// with half a stair at each end, so that the area is still the number of pairs.
    pub fn outline(&self, exact: bool) -> Vec<Point> {
        let keys = self.size.1;
        let (first, last) = self.rows_that_see();
        let seen = |row: usize| self.band.keys(row, keys);
        let mut right = side(first, last, exact, |row| seen(row).end);
        let left = side(first, last, exact, |row| seen(row).start);
        right.extend(left.into_iter().rev());
        right.dedup();
        if right.len() > 1 && right.first() == right.last() {
            right.pop();
        }
        let (x, y) = (self.origin.0 as f64, self.origin.1 as f64);
        right.into_iter().map(|(dx, dy)| (x + dx, y + dy)).collect()
    }

    /// The first and the last query that see any key; the bands of cells always have some.
    fn rows_that_see(&self) -> (usize, usize) {
        let (rows, keys) = self.size;
        let first = self.band.lo.max(0) as usize;
        let last = (rows as i64 - 1).min(self.band.hi + keys as i64 - 1).max(first as i64) as usize;
        (first, last)
    }

    /// The approximate middle of the largest square inside the cell, and half its side, for placing a number.
    pub fn middle(&self) -> (Point, f64) {
        const GRID: usize = 24;
        // Points are tried in the rectangle around the visible pairs: a grid over a whole tile may miss a narrow band.
        let (first, last) = self.rows_that_see();
        let (left, right) =
            (self.band.keys(first, self.size.1).start as f64, self.band.keys(last, self.size.1).end as f64);
        let (top, bottom) = (first as f64, (last + 1) as f64);
        // If all pairs are visible, the band cuts off no corner.
        let (lo, hi) = match self.band.is_full(self.size.0, self.size.1) {
            true => (f64::MIN, f64::MAX),
            false => (self.band.lo as f64 - 0.5, self.band.hi as f64 + 0.5),
        };
        let centre = ((left + right) / 2.0, (top + bottom) / 2.0);
        let mut best = (centre, f64::MIN, f64::MAX);
        for step in 0..GRID * GRID {
            let at = |index: usize, from: f64, to: f64| from + (index as f64 + 0.5) / GRID as f64 * (to - from);
            let (x, y) = (at(step % GRID, left, right), at(step / GRID, top, bottom));
            // A square of half side s reaches 2s further across the diagonal than its middle.
            let room = [x - left, y - top, right - x, bottom - y, (y - x - lo) / 2.0, (hi - y + x) / 2.0];
            let half = room.into_iter().fold(f64::MAX, f64::min);
            let off = (x - centre.0).abs() + (y - centre.1).abs();
            if half > best.1 + 1e-9 || (half > best.1 - 1e-9 && off < best.2) {
                best = ((x, y), half, off);
            }
        }
        let ((x, y), half, _) = best;
        ((self.origin.0 as f64 + x, self.origin.1 as f64 + y), half.max(0.0))
    }
}

/// One side from the top of row `first` to the bottom of row `last`; `x` rises by 0 or 1 a row, and only in one stretch.
fn side(first: usize, last: usize, exact: bool, x: impl Fn(usize) -> usize) -> Vec<Point> {
    let mut points = Vec::new();
    let mut push = |x: usize, y: f64| {
        let point = (x as f64, y);
        // The middle one of three points in a vertical line is dropped.
        if let [.., (a, _), (b, end)] = points.as_mut_slice()
            && *a == point.0
            && *b == point.0
        {
            *end = y;
        } else {
            points.push(point);
        }
    };
    if exact {
        for row in first..=last {
            push(x(row), row as f64);
            push(x(row), (row + 1) as f64);
        }
        return points;
    }
    // Bisection finds both ends of the rising stretch: the last row with the first x, and the first row with the last x.
    let top = first + partition(last - first + 1, |n| x(first + n) == x(first)) - 1;
    let bottom = first + partition(last - first + 1, |n| x(first + n) != x(last));
    push(x(first), first as f64);
    if top < bottom {
        push(x(top), top as f64 + 0.5);
        push(x(bottom), bottom as f64 + 0.5);
    }
    push(x(last), (last + 1) as f64);
    points
}

/// The number of `0..n` for which `holds` is true, if these come before all others.
fn partition(n: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut least, mut most) = (0, n);
    while least < most {
        let middle = least + (most - least) / 2;
        if holds(middle) { least = middle + 1 } else { most = middle }
    }
    least
}

impl Schedule {
    /// The cells that all ring ranks compute forward; together they contain every visible pair once.
    ///
    /// A tile of neighbouring tokens is one cell. In a striped tile, whose tokens are interleaved with those of other
    /// ranks, each pair is a cell.
    ///
    /// # Errors
    /// More cells than a picture can show; the message gives their number.
    pub fn cells(&self) -> Result<Vec<Cell>> {
        let refuse = |count: u64| {
            let tokens = self.query().documents().size();
            let problem = format!(
                "{count} cells of {tokens} queries, and at most {MOST_CELLS} can be told apart: \
                 draw fewer tokens, or wider stripes"
            );
            Err(Error::Drawing(problem))
        };
        // A Ulysses group holds neighbouring tokens in several runs, which are merged for the picture.
        let (queries, keys) = (self.query_groups().merged(), self.key_groups().merged());
        // An upper bound is checked first: every pair of runs of a document may become a cell.
        let runs = pairs_of_runs(&queries, &keys);
        if runs > 8 * MOST_CELLS {
            return refuse(runs);
        }
        let keys_of: Vec<_> = (0..self.grid().ring).map(|rank| Strand::by_document(keys.runs(rank))).collect();
        let (mut cells, mut count) = (Vec::new(), 0);
        for rank in 0..self.grid().ring {
            for (step, compute) in
                self.steps(Pass::Forward, rank).iter().enumerate().filter_map(|(n, s)| Some((n, s.compute.as_ref()?)))
            {
                for q in queries.runs(compute.queries) {
                    let (q_document, k_document) =
                        (queries.documents().get(q.document), keys.documents().get(q.document));
                    for strand in keys_of[compute.keys].get(&q.document).into_iter().flatten() {
                        let seq_lens = (q_document.seq_len, k_document.seq_len);
                        self.mask().search_banded_tiles(q, strand.runs(), seq_lens, |run, tile| {
                            let (q, k) = (q.part(&tile.q), strand.runs()[run].part(&tile.k));
                            let stride = if q.len == 1 { k.step } else { q.step };
                            count += if stride == 1 { 1 } else { tile.band.pairs(q.len, k.len) };
                            let origin = (k_document.offset + k.start, q_document.offset + q.start);
                            // Above the limit, cells are only counted.
                            if count <= MOST_CELLS {
                                add_cells((rank, step), origin, (q.len, k.len), stride, tile.band, &mut cells);
                            }
                        });
                    }
                }
            }
        }
        if count > MOST_CELLS { refuse(count) } else { Ok(cells) }
    }
}

/// Adds the cells of a tile whose first query and key are at `origin` (x, y), and whose tokens are `stride` apart.
fn add_cells(
    (rank, step): (usize, usize),
    (x, y): (usize, usize),
    (rows, columns): (usize, usize),
    stride: usize,
    band: Band,
    cells: &mut Vec<Cell>,
) {
    let Some(band) = band.clamp(rows, columns) else { return };
    if stride == 1 {
        let pairs = band.pairs(rows, columns);
        cells.push(Cell { rank, step, pairs, origin: (x, y), size: (rows, columns), band });
        return;
    }
    let one = Band { lo: 0, hi: 0 };
    for i in 0..rows {
        for j in band.keys(i, columns) {
            let origin = (x + j * stride, y + i * stride);
            cells.push(Cell { rank, step, pairs: 1, origin, size: (1, 1), band: one });
        }
    }
}

/// Number of pairs of a run of queries and a run of keys of the same document.
fn pairs_of_runs(queries: &Layout, keys: &Layout) -> u64 {
    let count = |layout: &Layout| {
        let mut counts = vec![0u64; layout.documents().len()];
        for run in (0..layout.ranks()).flat_map(|rank| layout.runs(rank)) {
            counts[run.document] += 1;
        }
        counts
    };
    count(queries).iter().zip(&count(keys)).fold(0, |sum: u64, (q, k)| sum.saturating_add(q.saturating_mul(*k)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A grid over the whole tile has no point on the one pair that the only query sees of 37 keys.
    #[test]
    fn the_middle_of_a_narrow_band_is_inside_it_however_wide_the_tile() {
        let band = Band { lo: -21, hi: -21 };
        for (size, pairs) in [((1, 37), 1), ((9, 37), 9), ((1000, 22), 1)] {
            let cell = Cell { rank: 0, step: 0, pairs, origin: (0, 0), size, band };
            let ((x, y), half) = cell.middle();
            assert!(half > 0.0 && (x - y - 21.0).abs() < 0.5, "{size:?}: ({x}, {y}), {half}");
        }
    }
}
