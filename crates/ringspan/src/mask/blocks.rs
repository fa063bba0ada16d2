//! Block-sparse masks: a list of visible pairs of blocks.

use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::fmt::{Display, Formatter};
use std::ops::Range;

/// Visible pairs of query blocks, of `query_block` positions each, and key blocks, of `key_block` positions each.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BlockPairs {
    query_block: usize,
    key_block: usize,
    /// For each block of queries, the key positions that it sees, as ascending ranges that do not touch.
    rows: BTreeMap<usize, Vec<Range<usize>>>,
}

impl BlockPairs {
    /// Query block a (positions from `a * query_block`) sees key block b for each `(a, b)` in `pairs`, in any order.
    ///
    /// # Errors
    /// Block sizes of zero, or block numbers whose positions are too large to count.
    pub fn new(query_block: usize, key_block: usize, pairs: impl IntoIterator<Item = (usize, usize)>) -> Result<Self> {
        if query_block == 0 || key_block == 0 {
            return Err(Error::Mask(format!(
                "blocks of {query_block} x {key_block} positions: at least 1 x 1 is needed"
            )));
        }
        let mut columns: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (a, b) in pairs {
            // Only half of the index range is allowed, so that later sums cannot overflow.
            let fits =
                |block: usize, size: usize| block.checked_add(1)?.checked_mul(size).filter(|&end| end < usize::MAX / 2);
            if fits(a, query_block).is_none() || fits(b, key_block).is_none() {
                return Err(Error::Mask(format!("the block pair ({a}, {b}) lies beyond any position")));
            }
            columns.entry(a).or_default().push(b);
        }
        let merged = |mut blocks: Vec<usize>| {
            blocks.sort_unstable();
            let mut ranges: Vec<Range<usize>> = Vec::new();
            for block in blocks {
                let (start, end) = (block * key_block, (block + 1) * key_block);
                match ranges.last_mut() {
                    Some(last) if last.end >= start => last.end = last.end.max(end),
                    _ => ranges.push(start..end),
                }
            }
            ranges
        };
        let rows = columns.into_iter().map(|(row, blocks)| (row, merged(blocks))).collect();
        Ok(Self { query_block, key_block, rows })
    }

    /// Whether the query at position `i` sees the key at position `j`.
    pub fn sees(&self, i: usize, j: usize) -> bool {
        self.rows.get(&(i / self.query_block)).is_some_and(|ranges| ranges.iter().any(|range| range.contains(&j)))
    }

    /// The rectangles of visible positions, as pairs of query and key ranges, whose queries overlap `queries`.
    pub(super) fn rectangles(&self, queries: Range<usize>) -> impl Iterator<Item = (Range<usize>, &Range<usize>)> {
        let size = self.query_block;
        let blocks = queries.start / size..queries.end.div_ceil(size).max(queries.start / size);
        self.rows
            .range(blocks)
            .flat_map(move |(row, ranges)| ranges.iter().map(move |keys| (row * size..(row + 1) * size, keys)))
    }
}

impl Display for BlockPairs {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let keys: usize = self.rows.values().flatten().map(ExactSizeIterator::len).sum();
        write!(f, "{} visible blocks of {} x {}", keys / self.key_block, self.query_block, self.key_block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_may_come_in_any_order_and_repeat() {
        let pairs = BlockPairs::new(4, 3, [(2, 1), (0, 0), (2, 0), (2, 1), (2, 5)]).expect("fits");
        let seen: Vec<usize> = (0..20).filter(|&j| pairs.sees(9, j)).collect();
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 15, 16, 17]);
        assert!(pairs.sees(3, 2) && !pairs.sees(4, 2) && !pairs.sees(3, 3));
        assert_eq!(
            pairs.rectangles(5..9).map(|r| (r.0, r.1.clone())).collect::<Vec<_>>(),
            [(8..12, 0..6), (8..12, 15..18)]
        );
        assert_eq!(pairs.to_string(), "4 visible blocks of 4 x 3");
    }

    #[test]
    fn blocks_of_nothing_or_beyond_everything_are_refused() {
        assert!(BlockPairs::new(0, 4, []).is_err() && BlockPairs::new(4, 0, []).is_err());
        assert!(BlockPairs::new(4, 4, [(usize::MAX / 4, 0)]).is_err());
        assert!(BlockPairs::new(4, 4, [(0, usize::MAX)]).is_err());
    }
}
