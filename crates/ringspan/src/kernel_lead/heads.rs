//! Which key-value head a query head reads.

use crate::error::{Error, Result};
use std::ops::Range;

/// For each query head on this rank, the key-value head on this rank that it reads; neighbours read the same or later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadMap {
    kv_of: Vec<usize>,
    kv_heads: usize,
}

impl HeadMap {
    /// Query head h reads key-value head `kv_of[h]` of `kv_heads`. Groups may be of unequal size.
    ///
    /// # Errors
    /// A map that falls or names a head that does not exist.
    pub fn new(kv_of: Vec<usize>, kv_heads: usize) -> Result<Self> {
        let rises = kv_of.windows(2).all(|pair| pair[0] <= pair[1]);
        if !rises || kv_of.last().is_some_and(|&last| last >= kv_heads) {
            return Err(Error::HeadGroups { heads: kv_of.len(), kv_heads });
        }
        Ok(Self { kv_of, kv_heads })
    }

    /// H query heads in G groups of equal size (grouped-query attention).
    ///
    /// # Errors
    /// H that is not a multiple of G.
    pub fn grouped(heads: usize, kv_heads: usize) -> Result<Self> {
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(Error::HeadGroups { heads, kv_heads });
        }
        Self::new((0..heads).map(|head| head / (heads / kv_heads)).collect(), kv_heads)
    }

    /// Query heads.
    pub fn heads(&self) -> usize {
        self.kv_of.len()
    }

    /// Key-value heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// The key-value head that a query head reads.
    pub fn kv_of(&self, head: usize) -> usize {
        self.kv_of[head]
    }

    /// The query heads that read a key-value head.
    pub fn readers(&self, kv_head: usize) -> Range<usize> {
        self.kv_of.partition_point(|&kv| kv < kv_head)..self.kv_of.partition_point(|&kv| kv <= kv_head)
    }
}
