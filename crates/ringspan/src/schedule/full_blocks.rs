//! Joins full blocks of the attention matrix, whose pairs are all visible, into few tiles.

use std::ops::Range;

/// A full block of the attention matrix: every query of `q` sees every key of `k`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FullBlock {
    pub(super) q: Range<usize>,
    pub(super) k: Range<usize>,
}

impl FullBlock {
    /// Whether `next` can be joined with this block: its queries follow directly, and neither end of its key range moves
    /// back.
    pub(super) fn is_followed_by(&self, next: &Self) -> bool {
        self.q.end == next.q.start && self.k.start <= next.k.start && self.k.end <= next.k.end
    }
}

/// Calls `each` with tiles, as ranges of queries and keys, that cover the pairs of these blocks once. Each block must be
/// [followed](FullBlock::is_followed_by) by the next. There are at most two tiles a block, and large ones if many queries
/// see the same keys.
pub(super) fn join(blocks: &[FullBlock], each: &mut impl FnMut(Range<usize>, Range<usize>)) {
    join_inside(blocks, 0..usize::MAX, each);
}

/// Does [`join`] for the keys inside `clip`. The keys that all blocks have in common become one tile; those before and after them are
/// joined in the same way, for each half of the blocks.
fn join_inside(blocks: &[FullBlock], clip: Range<usize>, each: &mut impl FnMut(Range<usize>, Range<usize>)) {
    let blocks = &blocks[blocks.partition_point(|block| block.k.end <= clip.start)..];
    let blocks = &blocks[..blocks.partition_point(|block| block.k.start < clip.end)];
    let (Some(first), Some(last)) = (blocks.first(), blocks.last()) else { return };
    let common = last.k.start.max(clip.start)..first.k.end.min(clip.end);
    let beside = if common.is_empty() {
        [clip, 0..0]
    } else {
        each(first.q.start..last.q.end, common.clone());
        [clip.start..common.start, common.end..clip.end]
    };
    if blocks.len() > 1 {
        let (above, below) = blocks.split_at(blocks.len() / 2);
        for clip in beside.into_iter().filter(|clip| !clip.is_empty()) {
            join_inside(above, clip.clone(), each);
            join_inside(below, clip, each);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn tiles_hold_every_pair_of_the_blocks_once(
            steps in prop::collection::vec((1usize..4, 0usize..6, 0usize..6), 1..40), width in 1usize..60,
        ) {
            let (mut q, mut k, mut blocks) = (3, 5..5 + width, Vec::<FullBlock>::new());
            for (rows, start, end) in steps {
                k = k.start + start..(k.end + end).max(k.start + start + 1);
                blocks.push(FullBlock { q: q..q + rows, k: k.clone() });
                q += rows;
            }
            prop_assert!(blocks.windows(2).all(|pair| pair[0].is_followed_by(&pair[1])));
            let mut seen = std::collections::HashSet::new();
            let mut count = 0;
            let mut twice = false;
            join(&blocks, &mut |q, k| {
                count += 1;
                for (i, j) in q.flat_map(|i| k.clone().map(move |j| (i, j))) {
                    twice |= !seen.insert((i, j));
                }
            });
            let wanted = blocks.iter().flat_map(|s| s.q.clone().flat_map(|i| s.k.clone().map(move |j| (i, j))));
            prop_assert!(!twice, "a pair is in two tiles");
            prop_assert_eq!(seen, wanted.collect());
            prop_assert!(count <= 2 * blocks.len(), "{} tiles of {} blocks", count, blocks.len());
        }
    }
}
