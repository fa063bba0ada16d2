//! Which heads a rank of the Ulysses axis computes.

use crate::error::{Error, Result};
use std::ops::Range;

/// The heads of one Ulysses rank: some query heads, and the key-value heads these read.
///
/// Key-value heads that several ranks read are sent to each of them, so U may exceed G, and H need not divide by U.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadShare {
    /// Query heads.
    pub query: Range<usize>,
    /// Key-value heads.
    pub kv: Range<usize>,
    /// For each of the query heads, which of the key-value heads it reads, counted from the first of the share.
    pub kv_of: Vec<usize>,
}

impl HeadShare {
    /// The shares of all ranks of a Ulysses axis of size `ulysses`, for `heads` query and `kv_heads` key-value heads.
    ///
    /// # Errors
    /// Query heads that are not a multiple of key-value heads, or fewer query heads than ranks.
    pub fn all(heads: usize, kv_heads: usize, ring: usize, ulysses: usize) -> Result<Vec<Self>> {
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) || heads == 0 {
            return Err(Error::HeadGroups { heads, kv_heads });
        }
        if ulysses > heads {
            return Err(Error::UlyssesHeads { ulysses, heads, ranks: ring * ulysses });
        }
        let group = heads / kv_heads;
        let share = |rank: usize| {
            let query = rank * heads / ulysses..(rank + 1) * heads / ulysses;
            let kv = query.start / group..(query.end - 1) / group + 1;
            let kv_of = query.clone().map(|head| head / group - kv.start).collect();
            Self { query, kv, kv_of }
        };
        Ok((0..ulysses).map(share).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_the_heads_once_and_name_the_right_keys() {
        for (heads, kv_heads) in [(8, 8), (8, 2), (8, 1), (6, 3), (12, 4)] {
            for ulysses in 1..=heads {
                let shares = HeadShare::all(heads, kv_heads, 1, ulysses).expect("fits");
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
    fn more_ranks_than_heads_are_refused_with_the_numbers() {
        let message = HeadShare::all(4, 2, 3, 8).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(
            message.contains("ulysses 8") && message.contains("there are 4") && message.contains("24"),
            "{message}"
        );
        assert!(HeadShare::all(6, 4, 1, 1).is_err());
    }
}
