//! The arguments of kernels: the structures of `source/common.cu`, with the same fields.

/// A tensor on the GPU.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct View {
    data: u64,
    token_stride: i64,
    head_stride: i64,
}

impl View {
    /// A tensor whose elements start at `data`.
    pub(super) fn new(view: &crate::kernel::View, data: u64) -> Self {
        Self { data, token_stride: view.token_stride as i64, head_stride: view.head_stride as i64 }
    }

    /// Whether tensor cores can read its rows of `dim` elements of `bytes` bytes: they read eight elements at once, in bf16
    /// 16 aligned bytes.
    pub(super) fn is_in_eights(&self, dim: usize, bytes: u64) -> bool {
        let strides = [self.token_stride, self.head_stride];
        dim.is_multiple_of(8)
            && (bytes != 2 || self.data.is_multiple_of(16) && strides.iter().all(|stride| stride % 8 == 0))
    }
}

/// A tile with its band, limited to the tile's size.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tile {
    pub(super) q: i32,
    pub(super) queries: i32,
    pub(super) k: i32,
    pub(super) keys: i32,
    pub(super) lo: i32,
    pub(super) hi: i32,
    pub(super) query: i64,
    pub(super) key: i64,
    pub(super) distance: i64,
    pub(super) step: i64,
}

/// Range of rows of the other side that a block has to compute with, in one tile.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct TilePart {
    pub(super) tile: i32,
    pub(super) from: i32,
    pub(super) to: i32,
}

/// The arguments of attention kernels. Pointers are addresses on the GPU.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Job {
    pub(super) q: View,
    pub(super) k: View,
    pub(super) v: View,
    pub(super) bias: View,
    pub(super) d_out: View,
    pub(super) tiles: u64,
    pub(super) parts: u64,
    pub(super) parts_of: u64,
    pub(super) kv_of: u64,
    pub(super) heads_of: u64,
    pub(super) terms: u64,
    pub(super) first: u64,
    pub(super) out: u64,
    pub(super) max: u64,
    pub(super) sum: u64,
    pub(super) delta: u64,
    pub(super) dq: u64,
    pub(super) dk: u64,
    pub(super) dv: u64,
    pub(super) d_bias: u64,
    pub(super) d_table: u64,
    pub(super) d_table_sum: u64,
    pub(super) seed: u64,
    pub(super) first_query: u64,
    pub(super) queries: i32,
    pub(super) keys: i32,
    pub(super) heads: i32,
    pub(super) kv_heads: i32,
    pub(super) bias_heads: i32,
    pub(super) bias_keys: i32,
    pub(super) buckets: i32,
    pub(super) buckets_of_one: i32,
    pub(super) blocks: i32,
    pub(super) first_head: i32,
    pub(super) threshold: u32,
    pub(super) scale: f32,
    pub(super) softcap: f32,
    pub(super) growth: f32,
}

/// The arguments of the kernels in `source/memory.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Move {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) rows: u64,
    pub(super) sinks: u64,
    pub(super) first: i64,
    pub(super) count: i64,
    pub(super) width: i64,
    pub(super) dim: i64,
    pub(super) row_stride: i64,
    pub(super) head_stride: i64,
    pub(super) tokens: i64,
    pub(super) heads: i64,
    pub(super) value: f32,
}

// SAFETY: the fields are plain numbers, laid out as in C.
unsafe impl cudarc::driver::DeviceRepr for Job {}
// SAFETY: as above.
unsafe impl cudarc::driver::DeviceRepr for Move {}
// SAFETY: as above.
unsafe impl cudarc::driver::DeviceRepr for Tile {}
// SAFETY: as above.
unsafe impl cudarc::driver::DeviceRepr for TilePart {}

/// Converts a size that is limited by those of the tensors, which were checked.
pub(super) fn checked(size: usize) -> i32 {
    i32::try_from(size).unwrap_or(i32::MAX)
}
