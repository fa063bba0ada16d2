//! Attention of banded tiles on one device: the f64 reference, the blocked CPU kernels, and the
//! trait [`Backend`] for devices with their own memory.
//!
//! Shape letters: Tq queries and Tk keys on this rank, H query heads, G key-value heads, D and Dv head widths.

mod backend;
mod backward;
mod buffer;
mod copies;
mod cpu;
mod decode;
mod delta;
mod device;
mod device_array;
mod device_tensor;
mod dispatch;
mod dropout;
mod dtype;
mod floats;
mod forward;
mod head_map;
pub mod int16;
mod isa;
mod message;
mod micro;
mod online_softmax;
mod pack;
mod plan;
pub mod product;
mod progress;
mod quantized;
pub mod reference;
mod relative_bias;
mod row_target;
mod scaling;
mod score;
mod staged;
mod state;
mod state_shape;
mod statistics;
mod sums;
mod team;
mod tensor_slice;
mod terms;
mod vector;
mod view;
mod visible;
mod workers;

#[cfg(test)]
mod test;

pub use backend::Backend;
pub use device::Kernel;
pub use device_array::{DeviceArray, DeviceMemory, DeviceSlice, DeviceSliceMut};
pub use device_tensor::DeviceTensor;
pub use dropout::Dropout;
pub use dtype::DType;
pub use floats::{Floats, FloatsMut};
pub use head_map::HeadMap;
pub use isa::Isa;
pub use online_softmax::OnlineSoftmax;
pub use progress::Progress;
pub use quantized::{BlockQ8_0, QuantizedSlice};
pub use relative_bias::{Buckets, RelativeBias};
pub use row_target::RowTarget;
pub use score::Score;
pub use state_shape::StateShape;
pub use statistics::Statistics;
pub use tensor_slice::TensorSlice;
pub use vector::{prefetch, prefetch_at};
pub use view::{Data, View};

pub(crate) use message::read;
pub(crate) use state::SoftmaxState;

use crate::mask::Band;
use std::ops::Range;

/// Number of keys between two updates of a softmax state; 96 to 256 are equally fast.
const KEY_BLOCK: usize = 128;

/// A tile of queries `q` and keys `k` (rows of this rank's queries and of the key block), whose visible pairs are in
/// `band`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tile {
    /// Query rows.
    pub q: Range<usize>,
    /// Key rows.
    pub k: Range<usize>,
    /// Visible pairs, with indices local to `q` and `k`.
    pub band: Band,
    /// Position of the tile in the batch; read only if scores depend on it (a relative term, a bias, dropout).
    pub position: TilePosition,
}

/// Position of a tile in the batch, for scores and dropout that depend on global positions.
///
/// Query i and key j, local to the tile, are the tokens `query + i * step` and `key + j * step`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TilePosition {
    /// Index of the first query in the flat batch `[B, Sq]`.
    pub query: usize,
    /// Index of the first key in its batch row.
    pub key: usize,
    /// Position of the first query minus that of the first key, as the mask counts positions.
    pub distance: i64,
    /// Distance of neighbouring tokens; a tile with one query or one key may have the step of the other side.
    pub step: usize,
}

impl TilePosition {
    /// The position of a tile at the start of a row, with the same positions for queries and keys.
    pub const START: Self = Self { query: 0, key: 0, distance: 0, step: 1 };
}

/// The inputs of a kernel call, except for the tiles.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Queries, `[Tq, H, D]`.
    pub q: View<'a>,
    /// Keys, `[Tk, G, D]`.
    pub k: View<'a>,
    /// Values, `[Tk, G, Dv]`.
    pub v: View<'a>,
    /// The key-value head that each query head reads.
    pub heads: &'a HeadMap,
    /// Scale and other parameters that turn products into weights, for these H heads.
    pub score: &'a Score,
    /// A term for each query, head and key of its batch row: `[Tq, H, Sk]`, or `[Tq, 1, Sk]` shared by all heads.
    pub bias: Option<View<'a>>,
}

impl<'a> Inputs<'a> {
    /// Whether scores depend on positions in the batch, so that the positions of tiles must be valid.
    pub(crate) fn counts_positions(&self) -> bool {
        self.bias.is_some() || self.score.counts_positions()
    }

    /// Whether processors that multiply bf16 do so here: queries, keys and values are stored in bf16, and did not only travel in it. The
    /// scale is then applied after the sums, so it must be positive for the maximum of products to be the maximum of scores.
    pub fn multiplies_in_bf16(&self) -> bool {
        let stored = |view: &View| view.data.dtype() == DType::Bf16 && !view.computes_in_f32;
        [self.q, self.k, self.v].iter().all(stored) && self.score.scale > 0.0
    }

    /// The input tensors: queries, keys, values, bias.
    fn views(&self) -> impl Iterator<Item = &View<'a>> {
        [&self.q, &self.k, &self.v].into_iter().chain(&self.bias)
    }
}

/// The values that a kernel's backward pass reads in addition to the inputs; statistics and delta are f32.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// Softmax statistics of each query over all its keys, not only those of this call.
    pub statistics: Statistics<Data<'a>>,
    /// [`Kernel::delta`] of the final output: `[H, Tq]`.
    pub delta: Data<'a>,
    /// Gradient of the output `[Tq, H, Dv]`.
    pub d_out: View<'a>,
}

/// The sums to which a kernel's backward pass adds gradients.
#[derive(Debug)]
pub struct Sums<'a> {
    /// Gradient of the queries, `[Tq, H, D]`.
    pub dq: FloatsMut<'a>,
    /// Gradient of the keys, `[Tk, G, D]`.
    pub dk: FloatsMut<'a>,
    /// Gradient of the values, `[Tk, G, Dv]`.
    pub dv: FloatsMut<'a>,
    /// Gradient of the table of relative buckets, `[H, count]`; empty without one.
    pub d_table: FloatsMut<'a>,
    /// Gradient of the bias, in its shape; empty without one.
    pub d_bias: FloatsMut<'a>,
}
