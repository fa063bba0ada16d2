//! What the queries of a ring rank see of the keys of another.

use super::{Compute, Rows, Schedule};
use crate::documents::Run;
use crate::error::Result;
use crate::kernel::{Place, Tile};
use std::collections::HashMap;
use std::sync::PoisonError;

impl Schedule {
    /// The tiles between the queries of ring rank `q` and the keys of ring rank `k`; a search ends once it has `limit`.
    pub(super) fn find_tiles(&self, q: usize, k: usize, limit: usize) -> Result<Vec<Tile>> {
        let mut tiles = Vec::new();
        let mut q_row = 0;
        for q_run in self.query_groups.runs(q) {
            let extent_q = self.query_groups.documents().get(q_run.document).extent;
            let extent_k = self.key_groups.documents().get(q_run.document).extent;
            for (k_row, k_run) in self.key_runs[k].get(&q_run.document).into_iter().flatten() {
                self.mask.visit_pieces(q_run, k_run, (extent_q, extent_k), |piece| {
                    let (q_part, k_part) = (q_run.part(&piece.q), k_run.part(&piece.k));
                    tiles.push(Tile {
                        q: q_row + piece.q.start..q_row + piece.q.end,
                        k: k_row + piece.k.start..k_row + piece.k.end,
                        band: piece.band,
                        place: self.place(&q_part, &k_part),
                    });
                })?;
                if tiles.len() >= limit {
                    return Ok(tiles);
                }
            }
            q_row += q_run.len;
        }
        Ok(tiles)
    }

    /// The key rows of ring rank `k` that some query of ring rank `q` sees.
    pub(super) fn needed(&self, q: usize, k: usize) -> Rows {
        let known = || self.needed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rows) = known().get(&(q, k)) {
            return rows.clone();
        }
        let tiles = self.find_tiles(q, k, usize::MAX).unwrap_or_default();
        let rows = Rows::union(tiles.iter().map(seen_keys).collect());
        known().insert((q, k), rows.clone());
        rows
    }

    /// A computation of an [`outline`](Self::outline) with its tiles.
    pub(crate) fn filled(&self, outline: &Compute) -> Compute {
        // `new` has made sure that this finds no error.
        let tiles = self.find_tiles(outline.queries, outline.keys, usize::MAX).unwrap_or_default();
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

/// The key rows of a tile that some query of it sees.
fn seen_keys(tile: &Tile) -> std::ops::Range<usize> {
    let (queries, keys) = (tile.q.len(), tile.k.len());
    // The visible keys move on with the query, so the first and the last query that see any bound them.
    let first = tile.band.keys(tile.band.lo.max(0) as usize, keys).start;
    let last = tile.band.keys((queries as i64 - 1).min(tile.band.hi + keys as i64 - 1).max(0) as usize, keys).end;
    tile.k.start + first..tile.k.start + last.max(first)
}

/// The tiles in rows of a block that holds `rows` only, which are at least what they see.
fn compact(tiles: Vec<Tile>, rows: &Rows) -> Vec<Tile> {
    let inside = |tile: Tile| {
        let seen = seen_keys(&tile);
        let cut = (seen.start - tile.k.start) as i64;
        // With keys counted from a later one, i - j grows by what was cut off.
        let band = crate::mask::Band { lo: tile.band.lo + cut, hi: tile.band.hi + cut };
        let place = Place {
            key: tile.place.key + cut as usize * tile.place.step,
            distance: tile.place.distance - cut * tile.place.step as i64,
            ..tile.place
        };
        Tile { k: rows.compact(&seen), band, place, ..tile }
    };
    tiles.into_iter().map(inside).collect()
}

/// Runs by document, each with its first row.
pub(super) fn by_document(runs: &[Run]) -> HashMap<usize, Vec<(usize, Run)>> {
    let mut map: HashMap<usize, Vec<(usize, Run)>> = HashMap::new();
    let mut row = 0;
    for run in runs {
        map.entry(run.document).or_default().push((row, *run));
        row += run.len;
    }
    map
}
