//! What is visible as a whole, side by side, as one.

use super::super::Tile;
use super::Part;
use crate::mask::Band;

/// Tiles of the same keys, visible as a whole, whose queries follow one another are one tile. The place is the first one's.
pub(super) fn tiles(tiles: &[Tile]) -> Vec<Tile> {
    let (mut whole, mut joined): (Vec<Tile>, Vec<Tile>) =
        tiles.iter().filter(|tile| !tile.q.is_empty() && !tile.k.is_empty()).cloned().partition(is_whole);
    whole.sort_by_key(|tile| (tile.k.start, tile.k.end, tile.q.start));
    for tile in whole {
        match joined.last_mut() {
            Some(last) if last.k == tile.k && last.q.end == tile.q.start && is_whole(last) => {
                last.q.end = tile.q.end;
                last.band = Band { lo: i64::MIN, hi: i64::MAX };
            }
            _ => joined.push(tile),
        }
    }
    joined
}

fn is_whole(tile: &Tile) -> bool {
    tile.band.is_full(tile.q.len(), tile.k.len())
}

/// Parts of a block that all its queries see as a whole, and whose keys follow one another, are one part.
pub(super) fn parts(parts: &mut Vec<Part>) {
    let (mut whole, mut joined): (Vec<Part>, Vec<Part>) =
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

#[cfg(test)]
mod tests {
    use super::super::super::Place;
    use super::super::Plan;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn blocks_of_a_striped_layout_see_the_past_as_one_part() {
        // Eight runs of 64 tokens, of which each sees those before it as a whole and itself causally.
        let mut tiles = Vec::new();
        for q in 0..8 {
            for k in 0..=q {
                let band = Band { lo: if k == q { 0 } else { i64::MIN }, hi: i64::MAX };
                tiles.push(Tile { q: q * 64..q * 64 + 64, k: k * 64..k * 64 + 64, band, place: Place::START });
            }
        }
        let (apart, joined) = (Plan::new(&tiles, 48, 512, 512), Plan::joined(&tiles, 48, 512, 512));
        for block in 0..joined.blocks() {
            let rows = joined.rows(block);
            let whole: usize = joined.parts(block).iter().map(|part| part.all.len()).sum();
            assert!(whole >= rows.start / 64 * 64, "rows {rows:?}: {whole} keys as a whole");
            assert!(joined.parts(block).len() <= 4, "rows {rows:?}: {} parts", joined.parts(block).len());
            assert!(joined.cost(block) <= apart.cost(block));
        }
    }

    proptest! {
        #[test]
        fn joined_parts_hold_every_visible_pair_once(
            q_cuts in prop::collection::vec(1usize..7, 1..6), k_cuts in prop::collection::vec(1usize..7, 1..6),
            bands in prop::collection::vec((-8i64..8, 0i64..9, 0u8..3), 25), lanes in 1usize..9,
        ) {
            // A grid of tiles; a third of them whole, a third not there.
            let (mut tiles, mut q) = (Vec::new(), 0);
            for (row, height) in q_cuts.iter().enumerate() {
                let mut k = 0;
                for (column, width) in k_cuts.iter().enumerate() {
                    let (lo, w, kind) = bands[row * 5 + column];
                    let band = if kind == 0 { Band { lo: -99, hi: 99 } } else { Band { lo, hi: lo + w } };
                    if kind < 2 {
                        tiles.push(Tile { q: q..q + height, k: k..k + width, band, place: Place::START });
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
