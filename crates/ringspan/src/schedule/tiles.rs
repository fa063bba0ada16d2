//! What the queries of a ring rank see of the keys of another.

use super::stairs::{self, Stair};
use super::{Compute, Rows, Schedule};
use crate::documents::{Run, Strand};
use crate::kernel::{Place, Tile};
use crate::mask::{Band, Seen};
use std::ops::Range;
use std::sync::PoisonError;

/// How what is visible becomes tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tiling {
    /// A tile for each pair of runs: its place tells where in the batch all of its tokens lie.
    Placed,
    /// As few tiles as can be found, whose places mean nothing: for scores that do not ask where tokens lie. Where documents
    /// have gaps, there are thousands of times as many pairs of runs.
    Joined,
}

impl Schedule {
    /// What the queries of ring rank `q` see of the keys of ring rank `k`: the first row of a run of queries, the run, a
    /// strand of keys, and what the run sees of it.
    fn search(&self, q: usize, k: usize, mut each: impl FnMut(usize, &Run, &Strand, Seen)) {
        let mut q_row = 0;
        for q_run in self.query_groups.runs(q) {
            let frame = |documents: &crate::Documents| documents.get(q_run.document).extent;
            let frames = (frame(self.query_groups.documents()), frame(self.key_groups.documents()));
            for strand in self.key_strands[k].get(&q_run.document).into_iter().flatten() {
                self.mask.search(q_run, strand.runs(), frames, |seen| each(q_row, q_run, strand, seen));
            }
            q_row += q_run.len;
        }
    }

    /// Visible pairs of a computation, for one head.
    pub(super) fn pairs_of(&self, compute: &Compute) -> u64 {
        let mut pairs = 0;
        self.search(compute.queries, compute.keys, |_, _, strand, seen| {
            pairs += match seen {
                Seen::Whole { q, runs } => (q.len() * strand.rows(&runs).len()) as u64,
                Seen::Piece { piece, .. } => piece.band.pairs(piece.q.len(), piece.k.len()),
            };
        });
        pairs
    }

    /// The tiles between the queries of ring rank `q` and the keys of ring rank `k`.
    fn tiles(&self, q: usize, k: usize, tiling: Tiling) -> Vec<Tile> {
        let mut tiles = Vec::new();
        // The n-th staircase is made of the n-th whole parts that neighbouring runs of queries see.
        let (mut open, mut run, mut number) = (Vec::<Vec<Stair>>::new(), usize::MAX, 0);
        self.search(q, k, |q_row, q_run, strand, seen| match seen {
            Seen::Piece { run, piece } => {
                let k_row = strand.rows(&(run..run + 1)).start;
                let place = self.place(&q_run.part(&piece.q), &strand.runs()[run].part(&piece.k));
                let (q, k) = (moved(&piece.q, q_row), moved(&piece.k, k_row));
                tiles.push(Tile { q, k, band: piece.band, place });
            }
            Seen::Whole { q, runs } if tiling == Tiling::Placed => {
                for run in runs {
                    let place = self.place(&q_run.part(&q), &strand.runs()[run]);
                    let (q, k) = (moved(&q, q_row), strand.rows(&(run..run + 1)));
                    tiles.push(Tile { band: Band::whole(q.len(), k.len()), q, k, place });
                }
            }
            Seen::Whole { q, runs } => {
                number = if run == q_row { number + 1 } else { 0 };
                run = q_row;
                if open.len() == number {
                    open.push(Vec::new());
                }
                let next = Stair { q: moved(&q, q_row), k: strand.rows(&runs) };
                if open[number].last().is_some_and(|last| !last.leads_to(&next)) {
                    close(&mut open[number], &mut tiles);
                }
                open[number].push(next);
            }
        });
        open.iter_mut().for_each(|stairs| close(stairs, &mut tiles));
        tiles
    }

    /// The key rows of ring rank `k` that some query of ring rank `q` sees.
    pub(super) fn needed(&self, q: usize, k: usize) -> Rows {
        let known = || self.needed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rows) = known().get(&(q, k)) {
            return rows.clone();
        }
        let rows = Rows::union(self.tiles(q, k, Tiling::Joined).iter().map(seen_keys).collect());
        known().insert((q, k), rows.clone());
        rows
    }

    /// A computation of an [`outline`](Self::outline) with its tiles.
    pub(crate) fn filled(&self, outline: &Compute, tiling: Tiling) -> Compute {
        let tiles = self.tiles(outline.queries, outline.keys, tiling);
        let some = outline.rows.len() < self.key_groups.tokens(outline.keys);
        Compute { tiles: if some { compact(tiles, &outline.rows) } else { tiles }, ..outline.clone() }
    }

    fn place(&self, q: &Run, k: &Run) -> Place {
        let (queries, keys) = (self.query_groups.documents(), self.key_groups.documents());
        let (q_document, k_document) = (queries.get(q.document), keys.get(k.document));
        Place {
            query: q_document.offset + q.start,
            key: k_document.offset + k.start - k_document.row * keys.row_len(),
            distance: self.mask.distance(q.start, k.start, q_document.extent, k_document.extent),
            step: if q.len == 1 { k.step } else { q.step },
        }
    }
}

/// A range counted from a later row.
fn moved(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}

/// Makes tiles of a staircase, which then is empty.
fn close(stairs: &mut Vec<Stair>, tiles: &mut Vec<Tile>) {
    let mut add = |q: Range<usize>, k: Range<usize>| {
        tiles.push(Tile { band: Band::whole(q.len(), k.len()), q, k, place: Place::START });
    };
    stairs::tiles(stairs, &mut add);
    stairs.clear();
}

/// The key rows of a tile that some query of it sees.
fn seen_keys(tile: &Tile) -> Range<usize> {
    let (queries, keys) = (tile.q.len(), tile.k.len());
    // The visible keys move on with the query, so the first and the last query that see any bound them.
    let first = tile.band.keys(tile.band.lo.max(0) as usize, keys).start;
    let last = tile.band.keys((queries as i64 - 1).min(tile.band.hi + keys as i64 - 1).max(0) as usize, keys).end;
    tile.k.start + first..tile.k.start + last.max(first)
}

/// The tiles in rows of a block that holds `rows` only, which are at least what they see.
fn compact(tiles: Vec<Tile>, rows: &Rows) -> Vec<Tile> {
    let compact = rows.compact();
    let inside = |tile: Tile| {
        let seen = seen_keys(&tile);
        let cut = (seen.start - tile.k.start) as i64;
        // With keys counted from a later one, i - j grows by what was cut off.
        let band = Band { lo: tile.band.lo + cut, hi: tile.band.hi + cut };
        let place = Place {
            key: tile.place.key + cut as usize * tile.place.step,
            distance: tile.place.distance - cut * tile.place.step as i64,
            ..tile.place
        };
        Tile { k: compact(&seen), band, place, ..tile }
    };
    tiles.into_iter().map(inside).collect()
}
