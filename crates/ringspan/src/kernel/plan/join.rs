//! Joins neighbouring tiles, and neighbouring parts of blocks.

use super::super::Tile;
use super::TilePart;
use crate::mask::Band;
use std::ops::Range;

/// Joins tiles of the same keys that are visible completely and whose queries are consecutive. The joined tile has the
/// position of the first.
pub(super) fn tiles(tiles: &[Tile]) -> Vec<Tile> {
    let mut joined: Vec<Tile> = Vec::new();
    // The last such tile by its first key. Tiles are ordered by queries, run by run, so no sorting is needed to find it.
    let mut whole = vec![usize::MAX; tiles.iter().map(|tile| tile.k.start + 1).max().unwrap_or(0)];
    for tile in tiles.iter().filter(|tile| !tile.q.is_empty() && !tile.k.is_empty()) {
        if is_whole(tile) {
            let last = &mut whole[tile.k.start];
            if let Some(before) = joined.get_mut(*last)
                && before.k == tile.k
                && before.q.end == tile.q.start
            {
                before.q.end = tile.q.end;
                before.band = Band { lo: i64::MIN, hi: i64::MAX };
                continue;
            }
            *last = joined.len();
        }
        joined.push(tile.clone());
    }
    joined
}

fn is_whole(tile: &Tile) -> bool {
    tile.band.is_full(tile.q.len(), tile.k.len())
}

/// Joins the parts of a block that all of its queries see completely and whose keys are consecutive.
pub(super) fn wholes(parts: &mut Vec<TilePart>) {
    let (mut whole, mut joined): (Vec<TilePart>, Vec<TilePart>) =
        parts.drain(..).partition(|part| !part.any.is_empty() && part.any == part.all);
    whole.sort_by_key(|part| part.any.start);
    for part in whole {
        match joined.last_mut() {
            Some(last) if last.any == last.all && last.any.end == part.any.start => {
                last.any.end = part.any.end;
                last.all.end = part.any.end;
            }
            _ => joined.push(part),
        }
    }
    *parts = joined;
}

/// Joins the parts of a block whose keys are consecutive, if each query's keys then form a band: so no block of keys is
/// visited twice. `seen` returns the keys of a part that a query row sees.
pub(super) fn neighbours(
    mut parts: Vec<TilePart>,
    rows: &Range<usize>,
    seen: impl Fn(&TilePart, usize) -> Range<usize>,
) -> Vec<TilePart> {
    parts.retain(|part| !part.any.is_empty());
    parts.sort_by_key(|part| part.any.start);
    let (mut joined, mut parts) = (Vec::new(), parts.into_iter().peekable());
    while let Some(first) = parts.next() {
        let (mut end, mut group) = (first.any.end, vec![first]);
        while let Some(next) = parts.next_if(|next| next.any.start <= end) {
            end = end.max(next.any.end);
            group.push(next);
        }
        match as_band(&group, rows, &seen) {
            Some(part) if group.len() > 1 => joined.push(part),
            _ => joined.extend(group),
        }
    }
    joined
}

/// The union of a group of parts, if each query sees one range of it, and both ends of the range advance with the queries.
fn as_band(
    group: &[TilePart],
    rows: &Range<usize>,
    seen: impl Fn(&TilePart, usize) -> Range<usize>,
) -> Option<TilePart> {
    let mut lanes = Vec::with_capacity(rows.len());
    for row in rows.clone() {
        let mut ranges: Vec<_> = group.iter().map(|part| seen(part, row)).filter(|keys| !keys.is_empty()).collect();
        ranges.sort_by_key(|keys| keys.start);
        if ranges.windows(2).any(|pair| pair[0].end != pair[1].start) {
            return None;
        }
        lanes.push(ranges.first().map_or(0, |keys| keys.start)..ranges.last().map_or(0, |keys| keys.end));
    }
    let first = lanes.iter().position(|keys| !keys.is_empty())?;
    let last = lanes.iter().rposition(|keys| !keys.is_empty())?;
    let seeing = &lanes[first..=last];
    let moves_on = |pair: &[Range<usize>]| pair[0].start <= pair[1].start && pair[0].end <= pair[1].end;
    if seeing.iter().any(Range::is_empty) || !seeing.windows(2).all(moves_on) {
        return None;
    }
    let any = lanes[first].start..lanes[last].end;
    let whole = seeing.len() == rows.len() && lanes[last].start < lanes[first].end;
    let all = if whole { lanes[last].start..lanes[first].end } else { any.start..any.start };
    Some(TilePart { tile: group[0].tile, any, all, joined: Some(lanes) })
}

#[cfg(test)]
mod tests {
    use super::super::super::TilePosition;
    use super::super::Plan;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn blocks_of_a_striped_layout_see_the_past_as_one_part() {
        // Eight runs of 64 tokens; each sees the runs before it completely and itself causally.
        let mut tiles = Vec::new();
        for q in 0..8 {
            for k in 0..=q {
                let band = Band { lo: if k == q { 0 } else { i64::MIN }, hi: i64::MAX };
                tiles.push(Tile {
                    q: q * 64..q * 64 + 64,
                    k: k * 64..k * 64 + 64,
                    band,
                    position: TilePosition::START,
                });
            }
        }
        let (apart, joined) = (Plan::new(&tiles, 48, 512, 512), Plan::joined(&tiles, 48, 512, 512));
        for block in 0..joined.blocks() {
            let rows = joined.rows(block);
            let whole: usize = joined.parts(block).iter().map(|part| part.all.len()).sum();
            assert!(whole >= rows.start / 64 * 64, "rows {rows:?}: {whole} keys as a whole");
            assert_eq!(joined.parts(block).len(), 1, "rows {rows:?}");
            assert!(joined.cost(block) <= apart.cost(block));
        }
    }

    proptest! {
        #[test]
        fn joined_parts_hold_every_visible_pair_once(
            q_cuts in prop::collection::vec(1usize..7, 1..6), k_cuts in prop::collection::vec(1usize..7, 1..6),
            bands in prop::collection::vec((-8i64..8, 0i64..9, 0u8..3), 25), lanes in 1usize..9,
        ) {
            // A grid of tiles; a third of them are full, and a third are missing.
            let (mut tiles, mut q) = (Vec::new(), 0);
            for (row, height) in q_cuts.iter().enumerate() {
                let mut k = 0;
                for (column, width) in k_cuts.iter().enumerate() {
                    let (lo, w, kind) = bands[row * 5 + column];
                    let band = if kind == 0 { Band { lo: -99, hi: 99 } } else { Band { lo, hi: lo + w } };
                    if kind < 2 {
                        tiles.push(Tile { q: q..q + height, k: k..k + width, band, position: TilePosition::START });
                    }
                    k += width;
                }
                q += height;
            }
            let (queries, keys) = (q, k_cuts.iter().sum::<usize>());
            let plan = Plan::joined(&tiles, lanes, queries, keys);
            let mut times = vec![0; queries * keys];
            for block in 0..plan.blocks() {
                for part in plan.parts(block) {
                    let (mut low, mut high) = (vec![0.0; lanes], vec![0.0; lanes]);
                    plan.bounds(block, part, part.any.start, part.any.len(), &mut low, &mut high);
                    for at in (0..part.any.len()).map(|at| at as f32) {
                        let sees: Vec<bool> = low.iter().zip(&high).map(|(low, high)| *low <= at && at < *high).collect();
                        let turns = sees.windows(2).filter(|pair| pair[0] != pair[1]).count();
                        prop_assert!(turns < 2 || turns == 2 && !sees[0], "lanes apart see key {}: {:?}", at, sees);
                    }
                    for (lane, i) in plan.rows(block).enumerate() {
                        for j in part.any.clone() {
                            let at = (j - part.any.start) as f32;
                            let visible = |tile: &Tile| tile.q.contains(&i) && tile.k.contains(&j)
                                && tile.band.sees(i - tile.q.start, j - tile.k.start);
                            prop_assert!(!part.all.contains(&j) || tiles.iter().any(visible), "query {}, key {}", i, j);
                            times[i * keys + j] += usize::from(low[lane] <= at && at < high[lane]);
                        }
                    }
                }
            }
            for i in 0..queries {
                for j in 0..keys {
                    let sees = |tile: &Tile| tile.q.contains(&i) && tile.k.contains(&j)
                        && tile.band.sees(i - tile.q.start, j - tile.k.start);
                    prop_assert_eq!(times[i * keys + j], usize::from(tiles.iter().any(sees)), "query {}, key {}", i, j);
                }
            }
        }
    }
}
