//! The left factor of a product with a quantized matrix.

use crate::matmul::Matrix;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, bail};
use std::ops::Range;

/// Rows of f32 numbers, `[tokens, width]`, which may lie apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Input<'a> {
    data: &'a [f32],
    pub(super) tokens: usize,
    pub(super) width: usize,
    stride: usize,
}

impl<'a> Input<'a> {
    /// Rows that are consecutive in memory.
    pub(super) fn new(data: &'a [f32], tokens: usize, width: usize) -> Self {
        debug_assert_eq!(data.len(), tokens * width);
        Self { data, tokens, width, stride: width }
    }

    /// The rows of a storage, each contiguous.
    pub(super) fn read(storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let (tokens, width) = layout.shape().dims2()?;
        match (storage, layout.stride()) {
            (CpuStorage::F32(data), &[stride, 1]) => {
                Ok(Self { data: data.get(layout.start_offset()..).unwrap_or_default(), tokens, width, stride })
            }
            (CpuStorage::F32(_), stride) => bail!("expected contiguous rows, given strides {stride:?}"),
            _ => bail!("expected f32, given {:?}", storage.dtype()),
        }
    }

    /// The row of a token.
    #[inline(always)]
    pub(super) fn row(&self, token: usize) -> &'a [f32] {
        &self.data[token * self.stride..][..self.width]
    }

    /// All rows, as a matrix.
    pub(super) fn matrix(&self) -> Matrix<'a> {
        Matrix::strided(self.data, self.tokens, self.width, self.stride)
    }

    /// A range of columns of all rows, as a matrix. There must be at least one row.
    pub(super) fn columns(&self, range: Range<usize>) -> Matrix<'a> {
        Matrix::strided(&self.data[range.start..], self.tokens, range.len(), self.stride)
    }
}
