//! Attention of banded tiles on one device: the plain reference, and the blocked CPU kernels.
//!
//! Shape letters: Tq queries and Tk keys on this rank, H query heads, G key-value heads, D and Dv head widths.

mod backward;
mod buffer;
mod cpu;
mod decode;
mod forward;
mod head_map;
mod isa;
mod micro;
mod pack;
mod partial;
mod plan;
pub mod reference;
mod vector;
mod workers;

#[cfg(test)]
mod test;

pub use cpu::Kernel;
pub use head_map::HeadMap;
pub use isa::Isa;
pub use partial::{Partial, delta};

use crate::mask::Band;
use std::ops::Range;

/// Keys between two updates of a softmax state: 96 to 256 measured alike.
const KEY_BLOCK: usize = 128;

/// A tensor `[tokens, heads, dim]` read in place; rows may lie anywhere, the last dimension is contiguous.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The elements.
    pub data: &'a [f32],
    /// Tokens.
    pub tokens: usize,
    /// Heads.
    pub heads: usize,
    /// Elements a head.
    pub dim: usize,
    /// Elements from one token to the next.
    pub token_stride: usize,
    /// Elements from one head to the next.
    pub head_stride: usize,
}

impl<'a> View<'a> {
    /// A contiguous `[tokens, heads, dim]` tensor; `None` if `data` has another size.
    pub fn new(data: &'a [f32], tokens: usize, heads: usize, dim: usize) -> Option<Self> {
        (data.len() == tokens * heads * dim).then_some(Self {
            data,
            tokens,
            heads,
            dim,
            token_stride: heads * dim,
            head_stride: dim,
        })
    }

    /// The elements of one token and head.
    #[inline]
    pub fn row(&self, token: usize, head: usize) -> &'a [f32] {
        let at = token * self.token_stride + head * self.head_stride;
        &self.data[at..at + self.dim]
    }
}

/// Queries `q` against keys `k` (rows of this rank's queries and of the key block), visible where `band` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tile {
    /// Query rows.
    pub q: Range<usize>,
    /// Key rows.
    pub k: Range<usize>,
    /// Visibility, in indices local to `q` and `k`.
    pub band: Band,
}

/// What changes a score besides the mask.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// Factor on `q . k`; usually 1/sqrt(D).
    pub scale: f32,
}
