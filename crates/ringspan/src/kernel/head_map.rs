//! The key-value head that each query head reads (grouped-query attention).

use crate::error::{Error, Result};

/// Maps local query heads to local key-value heads (grouped-query attention; Ainslie et al., 2023, arXiv:2305.13245).
///
/// Groups may have unequal sizes: a Ulysses share can start or end in the middle of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadMap {
    kv_of: Vec<usize>,
    kv_heads: usize,
}

impl HeadMap {
    /// `heads` query heads in `kv_heads` groups of equal size.
    ///
    /// # Errors
    /// `heads` is not a multiple of `kv_heads`.
    pub fn grouped(heads: usize, kv_heads: usize) -> Result<Self> {
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(Error::HeadGroups { heads, kv_heads });
        }
        let group = heads / kv_heads;
        Ok(Self { kv_of: (0..heads).map(|h| h / group).collect(), kv_heads })
    }

    /// Query head `h` reads key-value head `kv_of[h]` of `kv_heads`.
    ///
    /// # Errors
    /// `kv_of` decreases somewhere or names a head that does not exist.
    pub fn new(kv_of: Vec<usize>, kv_heads: usize) -> Result<Self> {
        if let Some(h) = (1..kv_of.len()).find(|&h| kv_of[h] < kv_of[h - 1]) {
            return Err(Error::Layout(format!(
                "query head {h} reads key-value head {}, but head {} before it reads {}: they must not decrease",
                kv_of[h],
                h - 1,
                kv_of[h - 1]
            )));
        }
        match kv_of.last() {
            Some(&last) if last >= kv_heads => {
                Err(Error::Layout(format!("a query head reads key-value head {last}, but there are {kv_heads}")))
            }
            _ => Ok(Self { kv_of, kv_heads }),
        }
    }

    /// Number of query heads.
    pub fn heads(&self) -> usize {
        self.kv_of.len()
    }

    /// Number of key-value heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// The key-value head of query head `head`.
    pub fn kv_of(&self, head: usize) -> usize {
        self.kv_of[head]
    }

    /// The query heads that read key-value head `kv`.
    pub fn queries_of(&self, kv: usize) -> std::ops::Range<usize> {
        self.kv_of.partition_point(|&x| x < kv)..self.kv_of.partition_point(|&x| x <= kv)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_may_be_unequal_but_not_out_of_order() {
        let map = HeadMap::new(vec![0, 1, 1, 1, 3], 4).expect("in order");
        assert_eq!((0..4).map(|g| map.queries_of(g)).collect::<Vec<_>>(), [0..1, 1..4, 4..4, 4..5]);
        assert_eq!((map.heads(), map.kv_heads(), map.kv_of(3)), (5, 4, 1));
        assert!(HeadMap::new(vec![0, 2, 1], 3).expect_err("decreases").to_string().contains("head 2 reads"));
        assert!(HeadMap::new(vec![0, 2], 2).expect_err("too large").to_string().contains("there are 2"));
    }

    #[test]
    fn heads_that_do_not_divide_name_the_numbers() {
        assert_eq!(HeadMap::grouped(6, 4), Err(Error::HeadGroups { heads: 6, kv_heads: 4 }));
        assert_eq!(HeadMap::grouped(6, 0), Err(Error::HeadGroups { heads: 6, kv_heads: 0 }));
        assert_eq!(HeadMap::grouped(6, 3), HeadMap::new(vec![0, 0, 1, 1, 2, 2], 3));
    }
}
