//! The heads that each rank of the Ulysses axis computes.

use crate::error::{Error, Result};
use crate::mesh::Grid;
use std::ops::Range;

/// The heads of one Ulysses rank: a range of query heads, and the key-value heads they read.
///
/// A key-value head that several ranks read is sent to each of them, so U may exceed G, and H need not be a multiple of U.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadShare {
    /// Query heads.
    pub query: Range<usize>,
    /// Key-value heads.
    pub kv: Range<usize>,
    /// For each query head, the key-value head it reads, counted from the start of `kv`.
    pub kv_of: Vec<usize>,
}

impl HeadShare {
    /// The shares of all ranks of a Ulysses axis of size `ulysses`, for `heads` query and `kv_heads` key-value heads.
    ///
    /// # Errors
    /// Query heads that are not a multiple of key-value heads, or fewer query heads than ranks.
    pub fn all(heads: usize, kv_heads: usize, grid: Grid) -> Result<Vec<Self>> {
        let ulysses = grid.ulysses;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) || heads == 0 {
            return Err(Error::HeadGroups { heads, kv_heads });
        }
        if ulysses > heads {
            return Err(Error::UlyssesHeads { ulysses, heads, ranks: grid.size().unwrap_or(usize::MAX) });
        }
        let group = heads / kv_heads;
        let share = |rank: usize| Self::of(rank * heads / ulysses..(rank + 1) * heads / ulysses, group);
        Ok((0..ulysses).map(share).collect())
    }

    /// The shares of all ranks, each cut into up to `chunks` parts that are computed one after the other; indexed by part,
    /// then by rank. Every rank has at least one head in every part. If this allows it, parts start at the first query head
    /// of a key-value head.
    ///
    /// # Errors
    /// Like those of [`all`](Self::all).
    pub fn parts(heads: usize, kv_heads: usize, grid: Grid, chunks: usize) -> Result<Vec<Vec<Self>>> {
        let shares = Self::all(heads, kv_heads, grid)?;
        let group = heads / kv_heads;
        let chunks = shares.iter().map(|share| share.query.len()).min().unwrap_or(1).min(chunks).max(1);
        let cut = |share: &Self, chunk: usize| {
            let at = |chunk: usize| {
                let even = share.query.start + chunk * share.query.len() / chunks;
                let aligned = even / group * group;
                let previous = share.query.start + chunk.saturating_sub(1) * share.query.len() / chunks;
                if 0 < chunk && chunk < chunks && aligned > previous { aligned } else { even }
            };
            Self::of(at(chunk)..at(chunk + 1), group)
        };
        Ok((0..chunks).map(|chunk| shares.iter().map(|share| cut(share, chunk)).collect()).collect())
    }

    /// The share of the given query heads (at least one), where `group` query heads read the same key-value head.
    fn of(query: Range<usize>, group: usize) -> Self {
        let kv = query.start / group..(query.end - 1) / group + 1;
        let kv_of = query.clone().map(|head| head / group - kv.start).collect();
        Self { query, kv, kv_of }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_the_heads_once_and_name_the_right_keys() {
        for (heads, kv_heads) in [(8, 8), (8, 2), (8, 1), (6, 3), (12, 4)] {
            for ulysses in 1..=heads {
                let shares = HeadShare::all(heads, kv_heads, Grid::new(1, ulysses)).expect("fits");
                let covered: Vec<usize> = shares.iter().flat_map(|share| share.query.clone()).collect();
                assert_eq!(covered, (0..heads).collect::<Vec<_>>());
                for share in &shares {
                    for (head, local) in share.query.clone().zip(&share.kv_of) {
                        assert_eq!(share.kv.start + local, head / (heads / kv_heads));
                    }
                }
            }
        }
    }

    #[test]
    fn parts_cover_each_share_once_and_leave_nobody_idle() {
        for (heads, kv_heads) in [(40, 40), (8, 2), (12, 4), (7, 1)] {
            for (ulysses, chunks) in [(1, 1), (1, 5), (2, 3), (3, 2), (4, 100), (7, 2)] {
                let grid = Grid::new(1, ulysses);
                let parts = HeadShare::parts(heads, kv_heads, grid, chunks).expect("fits");
                let shares = HeadShare::all(heads, kv_heads, grid).expect("fits");
                for (rank, share) in shares.iter().enumerate() {
                    let covered: Vec<usize> = parts.iter().flat_map(|part| part[rank].query.clone()).collect();
                    assert_eq!(covered, share.query.clone().collect::<Vec<_>>());
                    assert!(parts.iter().all(|part| !part[rank].query.is_empty()), "{heads} {ulysses} {chunks}");
                }
            }
        }
        // Four query heads share a key-value head: parts of 6 would cut a group, so the first part ends at 4.
        let parts = HeadShare::parts(12, 3, Grid::new(1, 1), 2).expect("fits");
        assert_eq!((parts[0][0].query.clone(), parts[1][0].query.clone()), (0..4, 4..12));
    }

    #[test]
    fn more_ranks_than_heads_are_refused_with_the_numbers() {
        let message = HeadShare::all(4, 2, Grid::new(3, 8)).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(
            message.contains("ulysses 8") && message.contains("there are 4") && message.contains("24"),
            "{message}"
        );
        assert!(HeadShare::all(6, 4, Grid::new(1, 1)).is_err());
    }
}
