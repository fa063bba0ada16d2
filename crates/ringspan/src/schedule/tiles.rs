//! The tiles between the queries of one ring rank and the keys of another.

use super::full_blocks::{self, FullBlock};
use super::{Compute, RowRanges, Schedule};
use crate::documents::{Documents, Run, Strand};
use crate::error::Result;
use crate::kernel::{Tile, TilePosition};
use crate::mask::{Band, BandedTile, VisiblePairs};
use std::ops::Range;
use std::sync::PoisonError;

/// How visible pairs are divided into tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tiling {
    /// One tile for each pair of runs, with the position of its tokens in the batch.
    WithPositions,
    /// As few tiles as possible, without valid positions: for scores that do not depend on positions. If documents have
    /// gaps, there are thousands of times as many pairs of runs.
    Joined,
}

impl Schedule {
    /// For each run of queries of ring rank `q` and strand of keys of ring rank `k` in the same document: the run's first
    /// row, the run, the strand, and the lengths that positions of queries and keys are counted in.
    fn runs_with_strands(&self, q: usize, k: usize) -> impl Iterator<Item = (usize, &Run, &Strand, (usize, usize))> {
        let first_row = |row: &mut usize, run: &'_ Run| std::mem::replace(row, *row + run.len);
        let mut row = 0;
        self.query_groups.runs(q).iter().flat_map(move |run| {
            let q_row = first_row(&mut row, run);
            let seq_len = |documents: &Documents| documents.get(run.document).seq_len;
            let seq_lens = (seq_len(self.query_groups.documents()), seq_len(self.key_groups.documents()));
            let strands = self.key_strands[k].get(&run.document).into_iter().flatten();
            strands.map(move |strand| (q_row, run, strand, seq_lens))
        })
    }

    /// Number of visible pairs of a computation, for one head.
    pub(super) fn pairs_of(&self, compute: &Compute) -> u64 {
        let mut pairs = 0;
        for (_, run, strand, seq_lens) in self.runs_with_strands(compute.queries, compute.keys) {
            self.mask.search(run, strand.runs(), seq_lens, |seen| pairs += seen.pairs(|runs| strand.rows(runs).len()));
        }
        pairs
    }

    /// Calls `each` with every tile between the queries of ring rank `q` and the keys of ring rank `k`.
    fn tiles(&self, q: usize, k: usize, tiling: Tiling, each: impl FnMut(Tile)) {
        match tiling {
            Tiling::WithPositions => self.tiles_with_positions(q, k, each),
            Tiling::Joined => self.joined_tiles(q, k, each),
        }
    }

    fn tiles_with_positions(&self, q: usize, k: usize, mut each: impl FnMut(Tile)) {
        for (q_row, q_run, strand, seq_lens) in self.runs_with_strands(q, k) {
            self.mask.search_banded_tiles(q_run, strand.runs(), seq_lens, |run, banded| {
                each(self.tile_with_position(q_row, q_run, strand, run, &banded));
            });
        }
    }

    fn joined_tiles(&self, q: usize, k: usize, mut each: impl FnMut(Tile)) {
        // A run of queries may see several ranges of key runs completely. `block_lists[n]` collects the n-th such range of consecutive
        // query runs, until a range cannot be joined to the list.
        let (mut block_lists, mut current_run, mut range_index) = (Vec::<Vec<FullBlock>>::new(), usize::MAX, 0);
        for (q_row, q_run, strand, seq_lens) in self.runs_with_strands(q, k) {
            self.mask.search(q_run, strand.runs(), seq_lens, |seen| match seen {
                VisiblePairs::BandedTile { run, tile } => {
                    each(self.tile_with_position(q_row, q_run, strand, run, &tile))
                }
                VisiblePairs::Whole { q, runs } => {
                    range_index = if current_run == q_row { range_index + 1 } else { 0 };
                    current_run = q_row;
                    if block_lists.len() == range_index {
                        block_lists.push(Vec::new());
                    }
                    let next = FullBlock { q: moved(&q, q_row), k: strand.rows(&runs) };
                    if block_lists[range_index].last().is_some_and(|last| !last.is_followed_by(&next)) {
                        full_blocks::join(&std::mem::take(&mut block_lists[range_index]), &mut |q, k| {
                            each(whole(q, k))
                        });
                    }
                    block_lists[range_index].push(next);
                }
            });
        }
        block_lists.iter().for_each(|blocks| full_blocks::join(blocks, &mut |q, k| each(whole(q, k))));
    }

    /// The tile of `banded`, which lies between a run of queries that begins at `q_row` and run number `run` of a strand.
    fn tile_with_position(&self, q_row: usize, q_run: &Run, strand: &Strand, run: usize, banded: &BandedTile) -> Tile {
        let k_row = strand.rows(&(run..run + 1)).start;
        let position = self.position(&q_run.part(&banded.q), &strand.runs()[run].part(&banded.k));
        Tile { q: moved(&banded.q, q_row), k: moved(&banded.k, k_row), band: banded.band, position }
    }

    /// The key rows of ring rank `k` that any query of ring rank `q` sees.
    pub fn needed_rows(&self, q: usize, k: usize) -> RowRanges {
        let known = || self.needed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rows) = known().get(&(q, k)) {
            return rows.clone();
        }
        let mut seen = Vec::new();
        self.tiles(q, k, Tiling::Joined, |tile| seen.push(seen_keys(&tile)));
        let rows = RowRanges::union(seen);
        known().insert((q, k), rows.clone());
        rows
    }

    /// A computation of [`steps`](Self::steps), completed with its tiles.
    pub(super) fn with_tiles(&self, compute: &Compute, tiling: Tiling) -> Compute {
        let mut tiles = Vec::new();
        self.tiles(compute.queries, compute.keys, tiling, |tile| tiles.push(tile));
        Compute { tiles: self.in_block(tiles, compute), ..compute.clone() }
    }

    /// Calls `each` with batches of at most `most` tiles of a computation of [`steps`](Self::steps): documents with
    /// gaps can have millions of tiles that are [with positions](Tiling::WithPositions).
    ///
    /// # Errors
    /// The first error of `each`.
    pub(crate) fn in_batches(
        &self,
        compute: &Compute,
        tiling: Tiling,
        most: usize,
        mut each: impl FnMut(&[Tile]) -> Result<()>,
    ) -> Result<()> {
        let (mut tiles, mut result) = (Vec::new(), Ok(()));
        self.tiles(compute.queries, compute.keys, tiling, |tile| {
            tiles.push(tile);
            if tiles.len() >= most && result.is_ok() {
                result = each(&self.in_block(std::mem::take(&mut tiles), compute));
            }
        });
        result?;
        if tiles.is_empty() { Ok(()) } else { each(&self.in_block(tiles, compute)) }
    }

    /// Changes key rows from the owner's rows to the rows that the block holds.
    fn in_block(&self, tiles: Vec<Tile>, Compute { keys, rows, .. }: &Compute) -> Vec<Tile> {
        if rows.len() < self.key_groups.tokens(*keys) { compact(tiles, rows) } else { tiles }
    }

    fn position(&self, q: &Run, k: &Run) -> TilePosition {
        let (queries, keys) = (self.query_groups.documents(), self.key_groups.documents());
        let (q_document, k_document) = (queries.get(q.document), keys.get(k.document));
        TilePosition {
            query: q_document.offset + q.start,
            key: k_document.offset + k.start - k_document.row * keys.row_len(),
            distance: self.mask.distance(q.start, k.start, q_document.seq_len, k_document.seq_len),
            step: if q.len == 1 { k.step } else { q.step },
        }
    }
}

/// The range shifted by `by` rows.
fn moved(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}

/// A tile in which all pairs are visible, without a valid position.
fn whole(q: Range<usize>, k: Range<usize>) -> Tile {
    Tile { band: Band::whole(q.len(), k.len()), q, k, position: TilePosition::START }
}

/// The key rows of a tile that any query of it sees.
fn seen_keys(tile: &Tile) -> Range<usize> {
    let (queries, keys) = (tile.q.len(), tile.k.len());
    // Visible keys advance with the query, so the first and the last query that see any give the bounds.
    let first = tile.band.keys(tile.band.lo.max(0) as usize, keys).start;
    let last = tile.band.keys((queries as i64 - 1).min(tile.band.hi + keys as i64 - 1).max(0) as usize, keys).end;
    tile.k.start + first..tile.k.start + last.max(first)
}

/// Changes key rows to those of a block that holds only `rows`, which include all rows that the tiles see.
fn compact(tiles: Vec<Tile>, rows: &RowRanges) -> Vec<Tile> {
    let compact = rows.compact();
    let inside = |tile: Tile| {
        let seen = seen_keys(&tile);
        let cut = (seen.start - tile.k.start) as i64;
        // When the first `cut` keys are removed, i - j grows by `cut`.
        let band = Band { lo: tile.band.lo + cut, hi: tile.band.hi + cut };
        let position = TilePosition {
            key: tile.position.key + cut as usize * tile.position.step,
            distance: tile.position.distance - cut * tile.position.step as i64,
            ..tile.position
        };
        Tile { k: compact(&seen), band, position, ..tile }
    };
    tiles.into_iter().map(inside).collect()
}
