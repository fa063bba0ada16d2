//! Masks by their usual names, and their conversion to bands.
//!
//! Between a run of queries and a run of keys, every mask is a list of [`BandedTile`]s: parts of both runs, and a [`Band`] that
//! says which i - j are visible. So a kernel only has to support bands.
//!
//! ```
//! use ringspan::Mask;
//!
//! // Five queries meet five keys or, with a KV cache, seven.
//! let causal = Mask::causal();
//! let masks = [
//!     (Mask::full(), 5),
//!     (causal.clone(), 5),
//!     (causal.clone().window(Some(2), None), 5),
//!     (Mask::causal_bottom_right(), 7),
//!     (causal.clone().chunked(3)?, 5),
//!     (causal.prefix_lm([2]), 5),
//! ];
//! let row = |i: usize| {
//!     let of = |(mask, keys): &(Mask, usize)| {
//!         (0..*keys).map(|j| if mask.sees(0, i, j, 5, *keys) { '#' } else { '.' }).collect::<String>()
//!     };
//!     masks.iter().map(of).collect::<Vec<_>>().join("  ")
//! };
//! assert_eq!([0, 1, 2, 3, 4].map(row), [
//!     // full  causal window cache    chunks prefix
//!     "#####  #....  #....  ###....  #....  ##...",
//!     "#####  ##...  ##...  ####...  ##...  ##...",
//!     "#####  ###..  ###..  #####..  ###..  ###..",
//!     "#####  ####.  .###.  ######.  ...#.  ####.",
//!     "#####  #####  ..###  #######  ...##  #####",
//! ]);
//! # Ok::<_, ringspan::Error>(())
//! ```
//!
//! A causal mask between equal runs is the band i - j >= 0. If the runs are at different positions, the band is shifted by
//! the distance of their first tokens, in steps; if the shifted band contains no pair, there is no tile:
//!
//! ```
//! use ringspan::{Mask, Run};
//!
//! let run = |start| Run { document: 0, start, len: 4, step: 1 };
//! let band = |mask: &Mask, queries, keys| {
//!     let tiles = mask.banded_tiles(&run(queries), &run(keys), 16, 16)?;
//!     Ok::<_, ringspan::Error>(tiles.first().map(|tile| (tile.band.lo, tile.band.hi, tile.band.pairs(4, 4))))
//! };
//! let causal = Mask::causal();
//! assert_eq!(band(&causal, 0, 0)?.map(|band| (band.0, band.2)), Some((0, 10)));   // a triangle
//! assert_eq!(band(&causal, 8, 0)?.map(|band| band.2), Some(16));                  // all of 4 x 4
//! assert_eq!(band(&causal, 0, 8)?, None);
//!
//! // A window of 5 keys back: query 4 + i sees key j iff 4 + i - j <= 5, that is i - j <= 1.
//! assert_eq!(band(&causal.window(Some(5), None), 4, 0)?.map(|band| (band.1, band.2)), Some((1, 13)));
//! # Ok::<_, ringspan::Error>(())
//! ```

mod band;
mod banded_tiles;
mod blocks;

#[cfg(test)]
mod test;

pub use band::Band;
pub use banded_tiles::BandedTile;
pub(crate) use banded_tiles::VisiblePairs;
pub use blocks::BlockPairs;

use crate::error::{Error, Result};
use std::sync::Arc;

/// A mask: which keys of its document a query may see. Documents and padding are not part of a mask but of the layout.
///
/// Query i sees key j iff `i - left <= j <= i + right` (a missing side has no limit), where i and j are positions in the
/// document. If the mask is aligned to the end, i counts from (number of keys - number of queries), so that the last query
/// is at the last key: this is for queries that follow a KV cache.
///
/// A mask can also be cut into [chunks](Self::chunked), opened for a [prefix](Self::prefix_lm), and restricted to [pairs of
/// blocks](Self::block_sparse); all of these can be combined.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Mask {
    left: Option<usize>,
    right: Option<usize>,
    end_aligned: bool,
    /// The `right` above 0 of a window on a causal mask: a contradiction, which [`check`](Self::check) reports as an error.
    ahead_of_causal: Option<usize>,
    chunk: Option<usize>,
    /// Prefix lengths: one for each document, or one for all.
    prefix: Option<Arc<[usize]>>,
    blocks: Option<Arc<BlockPairs>>,
}

impl Mask {
    /// Every query sees every key of its document.
    pub fn full() -> Self {
        Self {
            left: None,
            right: None,
            end_aligned: false,
            ahead_of_causal: None,
            chunk: None,
            prefix: None,
            blocks: None,
        }
    }

    /// Every query sees every key of its document, and the last query is at the last key: for two-sided
    /// [windows](Self::window) and [chunks](Self::chunked) with a KV cache.
    pub fn full_bottom_right() -> Self {
        Self { end_aligned: true, ..Self::full() }
    }

    /// Query i sees keys 0 to i.
    pub fn causal() -> Self {
        Self { right: Some(0), ..Self::full() }
    }

    /// Causal, with the last query at the last key.
    ///
    /// The last key is the last of the length that positions are counted in: for [`Documents::padded`] that is the row with
    /// its padding, for [`Documents::from_rows`] the document's own length.
    ///
    /// [`Documents::padded`]: crate::Documents::padded
    /// [`Documents::from_rows`]: crate::Documents::from_rows
    pub fn causal_bottom_right() -> Self {
        Self { end_aligned: true, ..Self::causal() }
    }

    /// Narrows the mask to a window of `left` keys before and `right` keys after the query's position.
    ///
    /// A causal mask hides all keys ahead, so a `right` above 0 contradicts it and is an error when the mask is used. For a
    /// window to both sides, start with [`full`](Self::full) or [`full_bottom_right`](Self::full_bottom_right).
    pub fn window(self, left: Option<usize>, right: Option<usize>) -> Self {
        let narrower = |a: Option<usize>, b: Option<usize>| match (a, b) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let ahead = right.filter(|&right| right > 0 && self.right == Some(0));
        Self {
            left: narrower(self.left, left),
            right: narrower(self.right, right),
            ahead_of_causal: self.ahead_of_causal.or(ahead),
            ..self
        }
    }

    /// Cuts positions into chunks of `size`: a query sees keys of its own chunk only (Llama 4's local layers).
    ///
    /// # Errors
    /// A chunk size of zero.
    pub fn chunked(self, size: usize) -> Result<Self> {
        match size {
            0 => Err(Error::Mask("chunks of 0 tokens: at least 1 is needed".into())),
            _ => Ok(Self { chunk: Some(size), ..self }),
        }
    }

    /// Lets every query see the first tokens of its document, even those ahead of it (prefix-LM; Raffel et al., 2020). The
    /// limit `left`, chunks and blocks still apply.
    ///
    /// `lengths` has one length for all documents, or one for each.
    pub fn prefix_lm(self, lengths: impl Into<Arc<[usize]>>) -> Self {
        Self { prefix: Some(lengths.into()), ..self }
    }

    /// Restricts the mask to a list of visible pairs of blocks of positions.
    pub fn block_sparse(self, pairs: BlockPairs) -> Self {
        Self { blocks: Some(Arc::new(pairs)), ..self }
    }

    /// The distance from a key at position `j` to a query at position `i`; `queries` and `keys` are the lengths that a
    /// document's query and key positions are counted in.
    pub fn distance(&self, i: usize, j: usize, queries: usize, keys: usize) -> i64 {
        i as i64 + self.shift(queries, keys) - j as i64
    }

    /// Whether a query at position `i` of a document sees its key at position `j`; `queries` and `keys` are lengths as in
    /// [`distance`](Self::distance).
    pub fn sees(&self, document: usize, i: usize, j: usize, queries: usize, keys: usize) -> bool {
        let distance = self.distance(i, j, queries, keys);
        let chunk = |position: i64| self.chunk.map(|size| position.div_euclid(tokens(size)));
        self.left.is_none_or(|left| distance <= tokens(left))
            && (self.right.is_none_or(|right| -distance <= tokens(right)) || j < self.prefix_of(document))
            && chunk(j as i64 + distance) == chunk(j as i64)
            && self.blocks.as_ref().is_none_or(|blocks| blocks.sees(i, j))
    }

    /// Checks that the mask fits `documents` documents.
    ///
    /// # Errors
    /// Another number of prefix lengths, or a causal mask with a window that includes keys ahead.
    pub fn check(&self, documents: usize) -> Result<()> {
        self.check_window()?;
        match self.prefix.as_ref().map(|lengths| lengths.len()) {
            None | Some(1) => Ok(()),
            Some(n) if n == documents => Ok(()),
            Some(n) => {
                Err(Error::Mask(format!("{n} prefix lengths for {documents} documents: give one, or one for each")))
            }
        }
    }

    pub(crate) fn check_window(&self) -> Result<()> {
        match self.ahead_of_causal {
            None => Ok(()),
            Some(ahead) => Err(Error::Mask(format!(
                "a causal mask sees no key ahead, and a window asks for {ahead}: take full or full-bottom-right with this \
                 window, or 0 or no limit ahead"
            ))),
        }
    }

    /// The prefix length of a document.
    fn prefix_of(&self, document: usize) -> usize {
        match self.prefix.as_deref() {
            None => 0,
            Some([length]) => *length,
            Some(lengths) => lengths.get(document).copied().unwrap_or(0),
        }
    }

    /// The largest number of positions before its own at which a query sees a key, where queries and keys are counted in the same
    /// length; `None` if nothing limits it.
    pub fn lookback(&self) -> Option<usize> {
        let of_chunk = self.chunk.map(|size| size.saturating_sub(1));
        self.left.into_iter().chain(of_chunk).min()
    }

    /// Whether the mask limits the keys ahead of a query; without this limit a prefix has no effect.
    pub fn limits_ahead(&self) -> bool {
        self.right.is_some()
    }

    /// The offset from a query's position to the key position it is aligned with.
    fn shift(&self, queries: usize, keys: usize) -> i64 {
        if self.end_aligned { keys as i64 - queries as i64 } else { 0 }
    }
}

/// A number of tokens for signed arithmetic, capped at a value beyond any position.
fn tokens(count: usize) -> i64 {
    count.min(i64::MAX as usize / 8) as i64
}

impl std::fmt::Display for Mask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match (self.right, self.end_aligned) {
            (Some(0), true) => "causal-bottom-right",
            (Some(0), false) => "causal",
            (_, true) => "full-bottom-right",
            (_, false) => "full",
        };
        f.write_str(name)?;
        let right = self.right.filter(|&right| right != 0);
        if self.left.is_some() || right.is_some() {
            let side = |side: Option<usize>| side.map_or("any".to_owned(), |n| n.to_string());
            write!(f, ", window {} back, {} ahead", side(self.left), side(self.right))?;
        }
        if let Some(size) = self.chunk {
            write!(f, ", chunks of {size}")?;
        }
        match self.prefix.as_deref() {
            None => (),
            Some([length]) => write!(f, ", prefix {length}")?,
            Some(lengths) => write!(f, ", {} prefixes", lengths.len())?,
        }
        match &self.blocks {
            Some(blocks) => write!(f, ", {blocks}"),
            None => Ok(()),
        }
    }
}
