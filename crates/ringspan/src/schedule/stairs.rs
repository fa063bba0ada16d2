//! Staircases: joins the keys that consecutive runs of queries see completely into few tiles.

use std::ops::Range;

/// Rows of queries that all see the same rows of keys completely.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stair {
    pub(super) q: Range<usize>,
    pub(super) k: Range<usize>,
}

impl Stair {
    /// Whether `next` continues this stair: its queries follow directly, and neither end of its key range moves back.
    pub(super) fn leads_to(&self, next: &Self) -> bool {
        self.q.end == next.q.start && self.k.start <= next.k.start && self.k.end <= next.k.end
    }
}

/// Calls `each` with the tiles, queries and keys, of a staircase of consecutive stairs: at most two tiles a stair, and
/// large ones if many queries see the same keys.
pub(super) fn tiles(stairs: &[Stair], each: &mut impl FnMut(Range<usize>, Range<usize>)) {
    inside(stairs, 0..usize::MAX, each);
}

/// [`tiles`] for the keys inside `clip`: first the keys common to all stairs, then the keys at both sides for each half of
/// the stairs.
fn inside(stairs: &[Stair], clip: Range<usize>, each: &mut impl FnMut(Range<usize>, Range<usize>)) {
    let stairs = &stairs[stairs.partition_point(|stair| stair.k.end <= clip.start)..];
    let stairs = &stairs[..stairs.partition_point(|stair| stair.k.start < clip.end)];
    let (Some(first), Some(last)) = (stairs.first(), stairs.last()) else { return };
    let common = last.k.start.max(clip.start)..first.k.end.min(clip.end);
    let beside = if common.is_empty() {
        [clip, 0..0]
    } else {
        each(first.q.start..last.q.end, common.clone());
        [clip.start..common.start, common.end..clip.end]
    };
    if stairs.len() > 1 {
        let (above, below) = stairs.split_at(stairs.len() / 2);
        for clip in beside.into_iter().filter(|clip| !clip.is_empty()) {
            inside(above, clip.clone(), each);
            inside(below, clip, each);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn tiles_hold_every_pair_of_the_stairs_once(
            steps in prop::collection::vec((1usize..4, 0usize..6, 0usize..6), 1..40), width in 1usize..60,
        ) {
            let (mut q, mut k, mut stairs) = (3, 5..5 + width, Vec::<Stair>::new());
            for (rows, start, end) in steps {
                k = k.start + start..(k.end + end).max(k.start + start + 1);
                stairs.push(Stair { q: q..q + rows, k: k.clone() });
                q += rows;
            }
            prop_assert!(stairs.windows(2).all(|pair| pair[0].leads_to(&pair[1])));
            let mut seen = std::collections::HashSet::new();
            let mut count = 0;
            let mut twice = false;
            tiles(&stairs, &mut |q, k| {
                count += 1;
                for (i, j) in q.flat_map(|i| k.clone().map(move |j| (i, j))) {
                    twice |= !seen.insert((i, j));
                }
            });
            let wanted = stairs.iter().flat_map(|s| s.q.clone().flat_map(|i| s.k.clone().map(move |j| (i, j))));
            prop_assert!(!twice, "a pair is in two tiles");
            prop_assert_eq!(seen, wanted.collect());
            prop_assert!(count <= 2 * stairs.len(), "{} tiles of {} stairs", count, stairs.len());
        }
    }
}
