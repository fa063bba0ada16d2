//! A mask between two runs, as bands over parts of them.

use super::{Band, Mask, tokens};
use crate::documents::Run;
use crate::error::{Error, Result};
use std::ops::Range;

/// A part of a run of queries and a part of a run of keys, in indices of the runs, and the band between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Queries of the run.
    pub q: Range<usize>,
    /// Keys of the run.
    pub k: Range<usize>,
    /// Visibility, in indices local to `q` and `k`.
    pub band: Band,
}

/// Positions of queries and keys between which one pair of limits holds.
struct Rectangle {
    q: Range<i64>,
    k: Range<i64>,
    right: Option<usize>,
}

impl Mask {
    /// The visible pieces between a run of queries and a run of keys; no pair is in two of them.
    ///
    /// `queries` and `keys` are the lengths of the document's frames, which an end-aligned mask needs.
    ///
    /// # Errors
    /// Runs of more than one token with unequal steps: their mask is no band. A mask that contradicts itself.
    pub fn pieces(&self, q: &Run, k: &Run, queries: usize, keys: usize) -> Result<Vec<Piece>> {
        let mut pieces = Vec::new();
        self.visit_pieces(q, k, (queries, keys), |piece| pieces.push(piece))?;
        Ok(pieces)
    }

    /// Shows `each` of the [`pieces`](Self::pieces): layouts of short runs have millions of pairs of runs.
    pub(crate) fn visit_pieces(
        &self,
        q: &Run,
        k: &Run,
        (queries, keys): (usize, usize),
        mut each: impl FnMut(Piece),
    ) -> Result<()> {
        self.check_window()?;
        if q.document != k.document || q.len == 0 || k.len == 0 {
            return Ok(());
        }
        // A run of one token has any step.
        let step = match (q.len, k.len) {
            (_, 1) => q.step,
            (1, _) => k.step,
            _ if q.step == k.step => q.step,
            _ => {
                return Err(Error::Layout(format!(
                    "runs with steps {} (queries) and {} (keys) have no band; use the same layout for both",
                    q.step, k.step
                )));
            }
        };
        let shift = self.shift(queries, keys);
        let mut add = |q_part: Range<usize>, k_part: Range<usize>, right: Option<usize>| {
            // Position distance = first + step * (i - j), to lie in -right ..= left.
            let position = |run: &Run, part: &Range<usize>| run.start as i64 + (part.start * step) as i64;
            let first = position(q, &q_part) + shift - position(k, &k_part);
            let step = step as i64;
            let lo = right.map_or(i64::MIN / 4, |right| div_ceil(-tokens(right) - first, step));
            let hi = self.left.map_or(i64::MAX / 4, |left| (tokens(left) - first).div_euclid(step));
            if let Some(band) = (Band { lo, hi }).clamp(q_part.len(), k_part.len()) {
                each(Piece { q: q_part, k: k_part, band });
            }
        };
        if self.chunk.is_none() && self.blocks.is_none() && self.prefix.is_none() {
            add(0..q.len, 0..k.len, self.right);
            return Ok(());
        }
        for Rectangle { q: q_positions, k: k_positions, right } in self.rectangles(q, k, shift) {
            let (q_part, k_part) = (within(q, step, q_positions), within(k, step, k_positions));
            if !q_part.is_empty() && !k_part.is_empty() {
                add(q_part, k_part, right);
            }
        }
        Ok(())
    }

    /// Rectangles of positions (queries in their own frame) that together hold all that chunks, blocks and the prefix
    /// leave visible.
    fn rectangles(&self, q: &Run, k: &Run, shift: i64) -> Vec<Rectangle> {
        let q_all = q.start as i64..(q.start + (q.len - 1) * q.step + 1) as i64;
        let k_all = k.start as i64..(k.start + (k.len - 1) * k.step + 1) as i64;
        let mut rectangles = vec![Rectangle { q: q_all.clone(), k: k_all, right: self.right }];
        let prefix = tokens(self.prefix_of(q.document));
        if prefix > 0 && self.right.is_some() {
            let split = |r: Rectangle| {
                let open = Rectangle { q: r.q.clone(), k: cut(&r.k, &(0..prefix)), right: None };
                [open, Rectangle { k: cut(&r.k, &(prefix..i64::MAX)), ..r }]
            };
            rectangles = rectangles.into_iter().flat_map(split).collect();
        }
        if let Some(size) = self.chunk.map(tokens) {
            let split = |r: Rectangle| {
                let first = (r.q.start + shift).div_euclid(size).max(r.k.start.div_euclid(size));
                let last = (r.q.end - 1 + shift).div_euclid(size).min((r.k.end - 1).div_euclid(size));
                let chunk = |c: i64| Rectangle {
                    q: cut(&r.q, &(c * size - shift..(c + 1) * size - shift)),
                    k: cut(&r.k, &(c * size..(c + 1) * size)),
                    right: r.right,
                };
                (first..=last).map(chunk).collect::<Vec<_>>()
            };
            rectangles = rectangles.into_iter().flat_map(split).collect();
        }
        if let Some(blocks) = &self.blocks {
            let split = |r: Rectangle| {
                let queries = r.q.start as usize..r.q.end.max(r.q.start) as usize;
                let block = |(rows, keys): (Range<usize>, &Range<usize>)| Rectangle {
                    q: cut(&r.q, &(rows.start as i64..rows.end as i64)),
                    k: cut(&r.k, &(keys.start as i64..keys.end as i64)),
                    right: r.right,
                };
                blocks.rectangles(queries).map(block).collect::<Vec<_>>()
            };
            rectangles = rectangles.into_iter().flat_map(split).collect();
        }
        rectangles
    }
}

fn cut(a: &Range<i64>, b: &Range<i64>) -> Range<i64> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// The tokens of a run, taken to have this step, whose positions lie in `positions`.
fn within(run: &Run, step: usize, positions: Range<i64>) -> Range<usize> {
    let index = |position: i64| div_ceil(position - run.start as i64, step as i64).clamp(0, run.len as i64) as usize;
    if positions.is_empty() { 0..0 } else { index(positions.start)..index(positions.end) }
}

fn div_ceil(a: i64, b: i64) -> i64 {
    -(-a).div_euclid(b)
}
