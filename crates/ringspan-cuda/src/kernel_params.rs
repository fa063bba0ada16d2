//! The arguments of kernels: the structures of `source/common.cu`, with the same fields.

/// A tensor on the GPU.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct View {
    data: u64,
    token_stride: i64,
    head_stride: i64,
}

impl View {
    /// A tensor whose elements start at `data`.
    pub(crate) fn new(view: &ringspan::kernel::View, data: u64) -> Self {
        Self { data, token_stride: view.token_stride as i64, head_stride: view.head_stride as i64 }
    }

    /// Whether tensor cores can read its rows of `dim` elements of `bytes` bytes: they read eight elements at once, in bf16
    /// 16 aligned bytes.
    pub(crate) fn is_in_eights(&self, dim: usize, bytes: u64) -> bool {
        let strides = [self.token_stride, self.head_stride];
        dim.is_multiple_of(8)
            && (bytes != 2 || self.data.is_multiple_of(16) && strides.iter().all(|stride| stride % 8 == 0))
    }
}

/// A tile with its band, limited to the tile's size.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tile {
    pub(crate) q: i32,
    pub(crate) queries: i32,
    pub(crate) k: i32,
    pub(crate) keys: i32,
    pub(crate) lo: i32,
    pub(crate) hi: i32,
    pub(crate) query: i64,
    pub(crate) key: i64,
    pub(crate) distance: i64,
    pub(crate) step: i64,
}

/// Range of rows of the other side that a block has to compute with, in one tile.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TilePart {
    pub(crate) tile: i32,
    pub(crate) from: i32,
    pub(crate) to: i32,
}

/// The arguments of attention kernels. Pointers are addresses on the GPU.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AttentionParams {
    pub(crate) q: View,
    pub(crate) k: View,
    pub(crate) v: View,
    pub(crate) bias: View,
    pub(crate) d_out: View,
    pub(crate) tiles: u64,
    pub(crate) parts: u64,
    pub(crate) parts_of: u64,
    pub(crate) kv_of: u64,
    pub(crate) heads_of: u64,
    pub(crate) terms: u64,
    pub(crate) first: u64,
    pub(crate) out: u64,
    pub(crate) max: u64,
    pub(crate) sum: u64,
    pub(crate) delta: u64,
    pub(crate) dq: u64,
    pub(crate) dk: u64,
    pub(crate) dv: u64,
    pub(crate) d_bias: u64,
    pub(crate) d_table: u64,
    pub(crate) d_table_sum: u64,
    pub(crate) seed: u64,
    pub(crate) first_query: u64,
    pub(crate) queries: i32,
    pub(crate) keys: i32,
    pub(crate) heads: i32,
    pub(crate) kv_heads: i32,
    pub(crate) bias_heads: i32,
    pub(crate) bias_keys: i32,
    pub(crate) buckets: i32,
    pub(crate) buckets_of_one: i32,
    pub(crate) blocks: i32,
    pub(crate) first_head: i32,
    pub(crate) threshold: u32,
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
    pub(crate) dropout_scale: f32,
}

/// The arguments of the kernels in `source/memory.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MemoryParams {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) rows: u64,
    pub(crate) sinks: u64,
    pub(crate) first: i64,
    pub(crate) count: i64,
    pub(crate) width: i64,
    pub(crate) dim: i64,
    pub(crate) row_stride: i64,
    pub(crate) head_stride: i64,
    pub(crate) tokens: i64,
    pub(crate) heads: i64,
    pub(crate) value: f32,
}

// SAFETY: the fields are plain numbers, laid out as in C.
unsafe impl cudarc::driver::DeviceRepr for AttentionParams {}
// SAFETY: as above.
unsafe impl cudarc::driver::DeviceRepr for MemoryParams {}
// SAFETY: as above.
unsafe impl cudarc::driver::DeviceRepr for Tile {}
// SAFETY: as above.
unsafe impl cudarc::driver::DeviceRepr for TilePart {}

/// Converts a size that is limited by those of the tensors, which were checked.
pub(crate) fn checked(size: usize) -> i32 {
    i32::try_from(size).unwrap_or(i32::MAX)
}
