//! Attention of banded tiles on one device: the plain reference, the blocked CPU kernels, and those of GPUs.
//!
//! Shape letters: Tq queries and Tk keys on this rank, H query heads, G key-value heads, D and Dv head widths.

mod backward;
mod buffer;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod decode;
mod delta;
mod device;
mod floats;
mod forward;
mod head_map;
mod held;
mod isa;
mod message;
mod micro;
mod pack;
mod partial;
mod plan;
pub mod product;
pub mod reference;
mod score;
#[cfg(feature = "cuda")]
mod staged;
mod state;
mod statistics;
mod sums;
mod team;
mod terms;
mod vector;
mod view;
mod workers;

#[cfg(test)]
mod test;

#[cfg(feature = "nccl")]
pub use cuda::nccl;
#[cfg(feature = "cuda")]
pub use cuda::{Gpu, GpuArray, GpuData, GpuElement, GpuMemory, GpuMut, GpuSource, Handed, Lent, nvrtc};
pub use device::{Kernel, Progress};
pub use floats::{Floats, FloatsMut};
pub use head_map::HeadMap;
pub use held::Held;
pub use isa::Isa;
pub use partial::Partial;
pub use score::{Buckets, Dropout, Relative, Score};
pub use statistics::Statistics;
pub use view::{Data, View};

pub(crate) use message::{Piece, read};
pub(crate) use state::State;
pub(crate) use sums::Place as SumPlace;
pub(crate) use view::Stored;

use crate::mask::Band;
use std::ops::Range;

/// Keys between two updates of a softmax state: 96 to 256 measured alike.
const KEY_BLOCK: usize = 128;

/// Queries `q` against keys `k` (rows of this rank's queries and of the key block), visible where `band` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tile {
    /// Query rows.
    pub q: Range<usize>,
    /// Key rows.
    pub k: Range<usize>,
    /// Visibility, in indices local to `q` and `k`.
    pub band: Band,
    /// Where in the batch the tile lies; read only where scores depend on it (a relative term, a bias, dropout).
    pub place: Place,
}

/// Where a tile lies in the batch: what scores that depend on positions, and dropout, count in.
///
/// Query i and key j, local to the tile, are the tokens `query + i * step` and `key + j * step`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Index of the first query in the flat batch `[B, Sq]`.
    pub query: usize,
    /// Index of the first key in its batch row.
    pub key: usize,
    /// Position of the first query less that of the first key, in the frame of the mask.
    pub distance: i64,
    /// Tokens from one row to the next; a tile of one query or key may have the other side's.
    pub step: usize,
}

impl Place {
    /// Tokens `0..` of one row, queries and keys alike.
    pub const START: Self = Self { query: 0, key: 0, distance: 0, step: 1 };
}

/// What a call of a kernel reads, besides the tiles.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// `[Tq, H, D]`
    pub q: View<'a>,
    /// `[Tk, G, D]`
    pub k: View<'a>,
    /// `[Tk, G, Dv]`
    pub v: View<'a>,
    /// Which key-value head a query head reads.
    pub heads: &'a HeadMap,
    /// From products to weights, for these H heads.
    pub score: &'a Score,
    /// A term for each query, head and key of its batch row: `[Tq, H, Sk]`, or `[Tq, 1, Sk]` for all heads.
    pub bias: Option<View<'a>>,
}

impl<'a> Inputs<'a> {
    /// Whether scores depend on where in the batch a query and a key lie, so that the places of tiles count.
    pub(crate) fn counts_positions(&self) -> bool {
        self.bias.is_some() || self.score.counts_positions()
    }

    /// The tensors.
    fn views(&self) -> impl Iterator<Item = &View<'a>> {
        [&self.q, &self.k, &self.v].into_iter().chain(&self.bias)
    }
}

/// What the backward pass of a kernel reads besides its inputs; statistics and delta in f32.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// Of each query over all its keys, not only these.
    pub statistics: Statistics<Data<'a>>,
    /// [`Kernel::delta`] of the final output: `[H, Tq]`.
    pub delta: Data<'a>,
    /// Gradient of the output `[Tq, H, Dv]`.
    pub d_out: View<'a>,
}

/// Where the backward pass of a kernel adds gradients.
#[derive(Debug)]
pub struct Sums<'a> {
    /// `[Tq, H, D]`
    pub dq: FloatsMut<'a>,
    /// `[Tk, G, D]`
    pub dk: FloatsMut<'a>,
    /// `[Tk, G, Dv]`
    pub dv: FloatsMut<'a>,
    /// Of the table of relative buckets `[H, count]`; empty without one.
    pub d_table: FloatsMut<'a>,
    /// Of the bias, in its shape; empty without one.
    pub d_bias: FloatsMut<'a>,
}
