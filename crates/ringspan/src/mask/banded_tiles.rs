//! Converts a mask between runs into bands over parts of the runs.

use super::{Band, Mask, tokens};
use crate::documents::Run;
use crate::error::{Error, Result};
use std::ops::Range;

/// Parts of a run of queries and of a run of keys, as indices into the runs, with the band between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BandedTile {
    /// The part of the run of queries.
    pub q: Range<usize>,
    /// The part of the run of keys.
    pub k: Range<usize>,
    /// The visible pairs, with indices counted from the starts of `q` and `k`.
    pub band: Band,
}

/// Visible pairs between some queries of a run and a list of key runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum VisiblePairs {
    /// Queries that see all tokens of several consecutive runs of keys.
    Whole {
        /// The part of the run of queries.
        q: Range<usize>,
        /// Indices of the key runs.
        runs: Range<usize>,
    },
    /// A tile of the run of queries and one run of keys.
    BandedTile {
        /// Index of the key run.
        run: usize,
        /// The parts of both runs, with their band.
        tile: BandedTile,
    },
}

impl VisiblePairs {
    /// Number of visible pairs; `tokens` gives the number of tokens of whole key runs.
    pub(crate) fn pairs(&self, tokens: impl Fn(&Range<usize>) -> usize) -> u64 {
        match self {
            Self::Whole { q, runs } => (q.len() * tokens(runs)) as u64,
            Self::BandedTile { tile, .. } => tile.band.pairs(tile.q.len(), tile.k.len()),
        }
    }
}

/// Ranges of query and key positions in which the limits `left` and `right` are the same for all pairs.
struct Rectangle {
    q: Range<i64>,
    k: Range<i64>,
    right: Option<usize>,
}

impl Mask {
    /// The visible tiles between a run of queries and a run of keys; no pair is in two of them.
    ///
    /// `queries` and `keys` are the lengths that the document's positions are counted in; an end-aligned mask needs them.
    ///
    /// # Errors
    /// Runs of more than one token with unequal steps, whose mask is no band, or a mask that contradicts itself.
    pub fn banded_tiles(&self, q: &Run, k: &Run, queries: usize, keys: usize) -> Result<Vec<BandedTile>> {
        self.check_window()?;
        let mut tiles = Vec::new();
        if q.document != k.document {
            return Ok(tiles);
        }
        if q.len > 1 && k.len > 1 && q.step != k.step {
            return Err(Error::Layout(format!(
                "runs with steps {} (queries) and {} (keys) have no band; use the same layout for both",
                q.step, k.step
            )));
        }
        self.search_banded_tiles(q, std::slice::from_ref(k), (queries, keys), |_, tile| tiles.push(tile));
        Ok(tiles)
    }

    /// Calls `each` with every visible part between a run of queries and key runs of the same document, in ascending order
    /// of positions; no pair is in two parts. The time is proportional to the number of parts, plus some bisections.
    ///
    /// If the runs have unequal steps, each token of the shorter one is a part, except for runs that are seen completely.
    pub(crate) fn search(
        &self,
        q: &Run,
        keys: &[Run],
        (q_seq_len, k_seq_len): (usize, usize),
        mut each: impl FnMut(VisiblePairs),
    ) {
        let (Some(first), Some(last)) = (keys.first(), keys.last()) else { return };
        if q.len == 0 || first.len == 0 {
            return;
        }
        let shift = self.shift(q_seq_len, k_seq_len);
        let all = Rectangle {
            q: q.start as i64..q.last() as i64 + 1,
            k: first.start as i64..last.last() as i64 + 1,
            right: self.right,
        };
        if self.chunk.is_none() && self.blocks.is_none() && self.prefix.is_none() {
            return self.search_rectangle(q, keys, &all, shift, &mut each);
        }
        for rectangle in self.rectangles(q.document, all, shift) {
            self.search_rectangle(q, keys, &rectangle, shift, &mut each);
        }
    }

    /// Like [`search`](Self::search), but with the parts of each key run separately: the index of the run, and a tile with
    /// a band.
    pub(crate) fn search_banded_tiles(
        &self,
        q: &Run,
        keys: &[Run],
        seq_lens: (usize, usize),
        mut each: impl FnMut(usize, BandedTile),
    ) {
        self.search(q, keys, seq_lens, |seen| match seen {
            VisiblePairs::BandedTile { run, tile } => each(run, tile),
            VisiblePairs::Whole { q: q_part, runs } => {
                for run in runs {
                    for (q, k) in alike(q, &q_part, &keys[run], &(0..keys[run].len)) {
                        each(run, BandedTile { band: Band::whole(q.len(), k.len()), q, k });
                    }
                }
            }
        });
    }

    /// Does a [`search`](Self::search) inside one rectangle.
    fn search_rectangle(
        &self,
        q: &Run,
        keys: &[Run],
        rectangle: &Rectangle,
        shift: i64,
        each: &mut impl FnMut(VisiblePairs),
    ) {
        let q_part = within(q, &rectangle.q);
        if q_part.is_empty() || rectangle.k.is_empty() {
            return;
        }
        let queries = q.part(&q_part);
        let (first, last) = (queries.start as i64 + shift, queries.last() as i64 + shift);
        // The positions that some of the queries may see, and the positions that all of them see.
        let (mut any, mut all) = (rectangle.k.clone(), rectangle.k.clone());
        if let Some(left) = self.left.map(tokens) {
            (any.start, all.start) = (any.start.max(first - left), all.start.max(last - left));
        }
        if let Some(right) = rectangle.right.map(tokens) {
            (any.end, all.end) = (any.end.min(last + right + 1), all.end.min(first + right + 1));
        }
        let from = keys.partition_point(|k| (k.last() as i64) < any.start);
        let to = from + keys[from..].partition_point(|k| (k.start as i64) < any.end);
        let whole_from = from + keys[from..to].partition_point(|k| (k.start as i64) < all.start);
        let whole_to = whole_from + keys[whole_from..to].partition_point(|k| (k.last() as i64) < all.end);
        if whole_from < whole_to {
            each(VisiblePairs::Whole { q: q_part.clone(), runs: whole_from..whole_to });
        }
        for run in (from..whole_from).chain(whole_to..to) {
            let k_part = within(&keys[run], &rectangle.k);
            for (q_part, k_part) in alike(q, &q_part, &keys[run], &k_part) {
                let band = self.band(&q.part(&q_part), &keys[run].part(&k_part), rectangle.right, shift);
                if let Some(band) = band {
                    each(VisiblePairs::BandedTile { run, tile: BandedTile { q: q_part, k: k_part, band } });
                }
            }
        }
    }

    /// The visible band between runs of equal steps; a run of a single token has any step.
    fn band(&self, q: &Run, k: &Run, right: Option<usize>, shift: i64) -> Option<Band> {
        let step = if q.len > 1 { q.step } else { k.step } as i64;
        // The distance of positions, first + step * (i - j), must be in -right ..= left.
        let first = q.start as i64 + shift - k.start as i64;
        let lo = right.map_or(i64::MIN / 4, |right| div_ceil(-tokens(right) - first, step));
        let hi = self.left.map_or(i64::MAX / 4, |left| (tokens(left) - first).div_euclid(step));
        Band { lo, hi }.clamp(q.len, k.len)
    }

    /// Rectangles of positions that together contain all pairs of `all` that chunks, blocks and the prefix leave visible.
    /// Query positions are not shifted to those of keys.
    fn rectangles(&self, document: usize, all: Rectangle, shift: i64) -> Vec<Rectangle> {
        let mut rectangles = vec![all];
        let prefix = tokens(self.prefix_of(document));
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

/// Splits parts of two runs into pairs with a band: one pair if the steps are equal, else one for each token of the shorter
/// part.
fn alike<'a>(
    q: &Run,
    q_part: &'a Range<usize>,
    k: &Run,
    k_part: &'a Range<usize>,
) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + 'a {
    let unlike = q.step != k.step && q_part.len() > 1 && k_part.len() > 1;
    let (by_q, by_k) = (unlike && q_part.len() <= k_part.len(), unlike && q_part.len() > k_part.len());
    let cut = |part: &'a Range<usize>, apart: bool| {
        let size = if apart { 1 } else { part.len().max(1) };
        part.clone().step_by(size).map(move |start| start..start + size)
    };
    cut(q_part, by_q).flat_map(move |q| cut(k_part, by_k).map(move |k| (q.clone(), k)))
}

/// The indices of a run's tokens whose positions are in `positions`.
fn within(run: &Run, positions: &Range<i64>) -> Range<usize> {
    let index =
        |position: i64| div_ceil(position - run.start as i64, run.step as i64).clamp(0, run.len as i64) as usize;
    if positions.is_empty() { 0..0 } else { index(positions.start)..index(positions.end) }
}

fn div_ceil(a: i64, b: i64) -> i64 {
    -(-a).div_euclid(b)
}
