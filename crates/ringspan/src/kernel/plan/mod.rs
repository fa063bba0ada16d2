//! Plans divide tiles into blocks of queries: which keys a block has to compute, and where it needs a mask.

mod join;

use super::{Tile, TilePosition};
use std::borrow::Cow;
use std::ops::Range;

/// The part of a tile that belongs to one block of queries.
pub(super) struct TilePart {
    /// Index of the tile in the plan.
    pub(super) tile: usize,
    /// Key rows that any query of the block sees.
    pub(super) any: Range<usize>,
    /// Key rows that every query of the block sees; possibly empty.
    pub(super) all: Range<usize>,
    /// Key rows that each query sees, if several tiles were joined; both ends advance with the query, as in a band.
    joined: Option<Vec<Range<usize>>>,
}

impl TilePart {
    /// The rows of `any` in a segment of the key rows.
    #[inline(always)]
    pub(super) fn any_in(&self, segment: &Range<usize>) -> Range<usize> {
        let start = self.any.start.max(segment.start);
        start..self.any.end.min(segment.end).max(start)
    }

    /// Whether some query of the block does not see some key of the rows `keys`, so that they need a mask.
    #[inline(always)]
    pub(super) fn hides_some(&self, keys: Range<usize>) -> bool {
        self.all.start > keys.start || self.all.end < keys.end
    }
}

/// The intersection of a block of queries and a block of keys of a tile.
#[derive(Clone)]
pub(super) struct BlockPair {
    position: TilePosition,
    /// Row of lane 0.
    row: usize,
    /// Rows of lane 0 and key 0, relative to the tile; negative if the tile begins later.
    i: i64,
    j: i64,
    /// Number of query and key rows of the tile.
    queries: usize,
    keys: usize,
}

impl BlockPair {
    /// The keys of a tile from row `key` on, with the tile's only query.
    pub(super) fn of_query(tile: &Tile, key: usize) -> Self {
        let j = (key - tile.k.start) as i64;
        Self { position: tile.position, row: tile.q.start, i: 0, j, queries: tile.q.len(), keys: tile.k.len() }
    }

    /// Distance of a lane and a key, given the difference of their indices.
    pub(super) fn distance(&self, lane_less_key: i64) -> i64 {
        self.position.distance + self.position.step as i64 * (self.i - self.j + lane_less_key)
    }

    /// Index of a lane's query in the flat batch. Lanes outside the tile get the index of its nearest query.
    pub(super) fn query(&self, lane: usize) -> usize {
        let i = (self.i + lane as i64).clamp(0, self.queries as i64 - 1) as usize;
        self.position.query + i * self.position.step
    }

    /// Index of a key in its batch row. Keys outside the tile get the index of its nearest key.
    pub(super) fn key(&self, key: usize) -> usize {
        let j = (self.j + key as i64).clamp(0, self.keys as i64 - 1) as usize;
        self.position.key + j * self.position.step
    }

    /// The row of the first query.
    pub(super) fn first_row(&self) -> usize {
        self.row
    }

    /// The row of a lane's query, if it is in the tile.
    pub(super) fn row(&self, lane: usize) -> Option<usize> {
        (0..self.queries as i64).contains(&(self.i + lane as i64)).then_some(self.row + lane)
    }

    /// Distance of neighbouring tokens.
    pub(super) fn step(&self) -> usize {
        self.position.step
    }

    /// The keys among the first `count` that are in the tile.
    pub(super) fn keys(&self, count: usize) -> Range<usize> {
        let end = (self.keys as i64 - self.j).clamp(0, count as i64) as usize;
        ((-self.j).max(0) as usize).min(end)..end
    }
}

/// Blocks of `lanes` queries, and the parts of tiles that each has to compute.
pub(super) struct Plan<'a> {
    tiles: Cow<'a, [Tile]>,
    lanes: usize,
    queries: usize,
    parts: Vec<Vec<TilePart>>,
    /// The smallest range that contains all visible keys.
    pub(super) keys: Range<usize>,
    seen_keys: Vec<bool>,
    seen_queries: Vec<bool>,
}

impl<'a> Plan<'a> {
    pub(super) fn new(tiles: &'a [Tile], lanes: usize, queries: usize, keys: usize) -> Self {
        Self::of(Cow::Borrowed(tiles), lanes, queries, keys)
    }

    /// A plan for scores that do not depend on positions: neighbouring tiles that are visible completely are joined.
    /// Layouts with many short runs, such as striped blocks, have thousands of such tiles, and blocks of queries that are
    /// in two of them.
    pub(super) fn joined(tiles: &'a [Tile], lanes: usize, queries: usize, keys: usize) -> Self {
        let mut plan = Self::of(Cow::Owned(join::tiles(tiles)), lanes, queries, keys);
        for block in 0..plan.blocks() {
            let mut parts = std::mem::take(&mut plan.parts[block]);
            let rows = plan.rows(block);
            join::wholes(&mut parts);
            plan.parts[block] = join::neighbours(parts, &rows, |part, row| plan.seen(part, &rows, row));
        }
        plan
    }

    fn of(tiles: Cow<'a, [Tile]>, lanes: usize, queries: usize, keys: usize) -> Self {
        let mut parts: Vec<Vec<TilePart>> = Vec::new();
        parts.resize_with(queries.div_ceil(lanes), Vec::new);
        let (mut seen_keys, mut seen_queries) = (Cover::new(keys), Cover::new(queries));
        let (mut first, mut last) = (keys, 0);
        for (index, tile) in tiles.iter().enumerate() {
            let Some(band) = tile.band.clamp(tile.q.len(), tile.k.len()) else { continue };
            // The queries from `lo` on see keys, until the last key has left the band.
            let from = band.lo.max(0) as usize;
            let to = tile.q.len().min((band.hi + tile.k.len() as i64) as usize);
            if from >= to {
                continue;
            }
            let rows = tile.q.start + from..tile.q.start + to;
            let (head, tail) = (band.keys(from, tile.k.len()), band.keys(to - 1, tile.k.len()));
            let seen = tile.k.start + head.start..tile.k.start + tail.end;
            (first, last) = (first.min(seen.start), last.max(seen.end));
            seen_keys.add(&seen);
            seen_queries.add(&rows);
            for (block, parts) in parts.iter_mut().enumerate().take(rows.end.div_ceil(lanes)).skip(rows.start / lanes) {
                let block = block * lanes..((block + 1) * lanes).min(queries);
                let (i0, i1) = (rows.start.max(block.start) - tile.q.start, rows.end.min(block.end) - tile.q.start);
                // The visible keys advance with the query, so the first and the last query bound them.
                let (head, tail) = (band.keys(i0, tile.k.len()), band.keys(i1 - 1, tile.k.len()));
                let shift = |keys: Range<usize>| tile.k.start + keys.start..tile.k.start + keys.end;
                let any = shift(head.start..tail.end);
                let whole = i1 - i0 == block.len() && tail.start < head.end;
                let all = if whole { shift(tail.start..head.end) } else { any.start..any.start };
                parts.push(TilePart { tile: index, any, all, joined: None });
            }
        }
        let (seen_keys, seen_queries) = (seen_keys.rows(), seen_queries.rows());
        Self { tiles, lanes, queries, parts, keys: first.min(last)..last, seen_keys, seen_queries }
    }

    /// Upper bound on the bytes of the lists in a plan for these tiles.
    pub(super) fn bytes(tiles: &[Tile], lanes: usize, queries: usize, keys: usize) -> u64 {
        let blocks_of = |tile: &Tile| tile.q.end.div_ceil(lanes).saturating_sub(tile.q.start / lanes);
        let (blocks, parts) = (queries.div_ceil(lanes), tiles.iter().map(blocks_of).sum::<usize>());
        // A growing list has capacity for at most twice its elements, and at first for four. A joined part of a block also
        // has a range for each query.
        let of_block = size_of::<Vec<TilePart>>() + 4 * size_of::<TilePart>() + lanes * size_of::<Range<usize>>();
        let lists = 2 * (parts * size_of::<TilePart>() + size_of_val(tiles)) + blocks * of_block;
        (lists + (queries + keys) * (size_of::<i32>() + 1)) as u64
    }

    /// Number of blocks of queries.
    pub(super) fn blocks(&self) -> usize {
        self.parts.len()
    }

    /// The query rows of a block.
    pub(super) fn rows(&self, block: usize) -> Range<usize> {
        block * self.lanes..((block + 1) * self.lanes).min(self.queries)
    }

    /// The parts that a block has to compute.
    pub(super) fn parts(&self, block: usize) -> &[TilePart] {
        &self.parts[block]
    }

    /// The cost of a block: the key rows that it computes, summed over its parts.
    pub(super) fn cost(&self, block: usize) -> usize {
        self.parts[block].iter().map(|part| part.any.len()).sum()
    }

    /// The cost of a block within a segment of the key rows.
    pub(super) fn cost_in(&self, block: usize, segment: &Range<usize>) -> usize {
        self.parts[block].iter().map(|part| part.any_in(segment).len()).sum()
    }

    /// Divides the blocks of `heads` heads among at most `workers` workers with about the same cost: heads, each with a
    /// range of blocks.
    pub(super) fn shares(&self, heads: usize, workers: usize) -> Vec<Vec<(usize, Range<usize>)>> {
        let per_head: usize = (0..self.blocks()).map(|block| self.cost(block)).sum();
        let total = (heads * per_head) as u128;
        let mut shares: Vec<Vec<(usize, Range<usize>)>> = vec![Vec::new(); workers];
        let mut before = 0;
        for head in 0..heads {
            for block in 0..self.blocks() {
                let cost = self.cost(block);
                if cost == 0 {
                    continue;
                }
                // The block belongs to the worker whose share of the total cost contains the block's middle.
                let worker = ((2 * before + cost) as u128 * workers as u128 / (2 * total)) as usize;
                before += cost;
                let share = &mut shares[worker.min(workers - 1)];
                match share.last_mut() {
                    Some((last, blocks)) if *last == head => blocks.end = block + 1,
                    _ => share.push((head, block..block + 1)),
                }
            }
        }
        shares.retain(|share| !share.is_empty());
        shares
    }

    /// Like [`shares`](Self::shares), but each block belongs to one worker for all heads.
    pub(super) fn shares_by_block(&self, heads: usize, workers: usize) -> Vec<Vec<(usize, Range<usize>)>> {
        let of_one = self.shares(1, workers);
        let of_all = |share: Vec<(usize, Range<usize>)>| {
            (0..heads).flat_map(|head| share.iter().map(move |(_, blocks)| (head, blocks.clone()))).collect()
        };
        of_one.into_iter().map(of_all).collect()
    }

    /// Whether any query sees this key row. Other rows are never read, so they may contain anything.
    pub(super) fn sees_key(&self, row: usize) -> bool {
        self.seen_keys[row]
    }

    /// Whether this query row sees any key.
    pub(super) fn sees_anything(&self, row: usize) -> bool {
        self.seen_queries[row]
    }

    /// Key rows of a part that query `row` of the block `rows` sees.
    fn seen(&self, part: &TilePart, rows: &Range<usize>, row: usize) -> Range<usize> {
        if part.any == part.all {
            return part.all.clone();
        }
        if let Some(joined) = &part.joined {
            return joined[row - rows.start].clone();
        }
        let tile = &self.tiles[part.tile];
        if !tile.q.contains(&row) {
            return part.any.start..part.any.start;
        }
        let keys = tile.band.keys(row - tile.q.start, tile.k.len());
        tile.k.start + keys.start..tile.k.start + keys.end
    }

    /// The intersection of a block and the keys from row `base` on.
    pub(super) fn block_pair(&self, block: usize, part: &TilePart, base: usize) -> BlockPair {
        let (tile, rows) = (&self.tiles[part.tile], self.rows(block));
        let (i, j) = (rows.start as i64 - tile.q.start as i64, base as i64 - tile.k.start as i64);
        // Lanes after the block's last query are outside the tile.
        let queries = tile.q.len().min(rows.end - tile.q.start.min(rows.end));
        BlockPair { position: tile.position, row: rows.start, i, j, queries, keys: tile.k.len() }
    }

    /// For each lane the visible keys of a part, `low[lane]..high[lane]`, counted from `base` and limited to `width`.
    ///
    /// Lanes after the last query see nothing.
    pub(super) fn bounds(
        &self,
        block: usize,
        part: &TilePart,
        base: usize,
        width: usize,
        low: &mut [f32],
        high: &mut [f32],
    ) {
        let rows = self.rows(block);
        for (lane, (low, high)) in low.iter_mut().zip(high).enumerate() {
            let row = rows.start + lane;
            let keys = if row < rows.end { self.seen(part, &rows, row) } else { base..base };
            // Blocks are narrow, so f32 represents these numbers exactly.
            [*low, *high] = [keys.start, keys.end].map(|key| (key.clamp(base, base + width) - base) as f32);
        }
    }
}

/// Finds the rows that are in any of many ranges, in time that does not depend on the lengths of the ranges.
struct Cover {
    /// For each row, the number of ranges that begin there, minus the number that end there.
    changes: Vec<i32>,
}

impl Cover {
    fn new(rows: usize) -> Self {
        Self { changes: vec![0; rows + 1] }
    }

    fn add(&mut self, rows: &Range<usize>) {
        self.changes[rows.start] += 1;
        self.changes[rows.end] -= 1;
    }

    /// For each row, whether it is in a range.
    fn rows(mut self) -> Vec<bool> {
        self.changes.pop();
        let count = |ranges: &mut i32, change: i32| {
            *ranges += change;
            Some(*ranges > 0)
        };
        self.changes.into_iter().scan(0, count).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::Band;
    use proptest::prelude::*;

    #[test]
    fn one_key_head_keeps_all_threads_busy() {
        // Two workers share one key-value head: the second has a private sum, and both do about half.
        let tiles = [Tile { q: 0..960, k: 0..960, band: Band { lo: 0, hi: i64::MAX }, position: TilePosition::START }];
        let plan = Plan::new(&tiles, 48, 960, 960);
        for heads in [1, 2, 3] {
            let shares = plan.shares(heads, 2);
            assert_eq!(shares.len(), 2);
            let cost = |share: &[(usize, Range<usize>)]| -> usize {
                share.iter().flat_map(|(_, blocks)| blocks.clone()).map(|block| plan.cost(block)).sum()
            };
            let (a, b) = (cost(&shares[0]) as f64, cost(&shares[1]) as f64);
            assert!((a / b - 1.0).abs() < 0.2, "{heads} heads: {a} and {b}");
        }
    }

    proptest! {
        #[test]
        fn parts_hold_every_visible_pair_once_and_whole_ranges_are_visible_to_all(
            q0 in 0usize..9, n in 0usize..20, k0 in 0usize..9, m in 0usize..20, lo in -25i64..25, w in 0i64..30, lanes in 1usize..9,
        ) {
            let tile = Tile { q: q0..q0 + n, k: k0..k0 + m, band: Band { lo, hi: lo + w }, position: TilePosition::START };
            let (queries, keys) = (q0 + n + 3, k0 + m + 2);
            let tiles = [tile.clone()];
            let plan = Plan::new(&tiles, lanes, queries, keys);
            let sees = |i: usize, j: usize| tile.q.contains(&i) && tile.k.contains(&j) && tile.band.sees(i - q0, j - k0);
            for j in 0..keys {
                if (0..queries).any(|i| sees(i, j)) {
                    prop_assert!(plan.sees_key(j) && plan.keys.contains(&j));
                }
            }
            for i in 0..queries {
                prop_assert_eq!(plan.sees_anything(i), (0..keys).any(|j| sees(i, j)));
            }
            for block in 0..plan.blocks() {
                let rows = plan.rows(block);
                prop_assert!(plan.parts(block).len() <= 1);
                let mut pairs = 0;
                for part in plan.parts(block) {
                    let (mut low, mut high) = (vec![0.0; lanes], vec![0.0; lanes]);
                    let base = part.any.start.saturating_sub(1);
                    plan.bounds(block, part, base, part.any.len() + 2, &mut low, &mut high);
                    for (lane, i) in rows.clone().enumerate() {
                        for j in part.any.clone() {
                            let at = (j - base) as f32;
                            prop_assert_eq!(sees(i, j), low[lane] <= at && at < high[lane]);
                            prop_assert!(sees(i, j) || !part.all.contains(&j));
                            pairs += usize::from(sees(i, j));
                        }
                    }
                }
                let wanted = rows.map(|i| (0..keys).filter(|&j| sees(i, j)).count()).sum::<usize>();
                prop_assert_eq!(pairs, wanted);
            }
        }
    }
}
