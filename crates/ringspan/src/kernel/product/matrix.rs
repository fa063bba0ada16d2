//! Matrices in slices, with strides.

use super::super::view::Data;
use half::bf16;
use std::ops::Range;

/// The type of a factor's elements: `f32` or `bf16`.
pub trait Element: Copy + Send + Sync + sealed::Stored {}

impl Element for f32 {}
impl Element for bf16 {}

mod sealed {
    use super::{Data, bf16};

    pub trait Stored: Sized {
        const IS_BF16: bool;
        fn data(elements: &[Self]) -> Data<'_>;
    }

    impl Stored for f32 {
        const IS_BF16: bool = false;

        fn data(elements: &[Self]) -> Data<'_> {
            Data::F32(elements)
        }
    }

    impl Stored for bf16 {
        const IS_BF16: bool = true;

        fn data(elements: &[Self]) -> Data<'_> {
            Data::Bf16(elements)
        }
    }
}

/// A matrix in a slice, with strides: either the elements of its rows or those of its columns are contiguous.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a, T = f32> {
    pub(super) data: &'a [T],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// A matrix whose rows follow one another.
    ///
    /// # Panics
    /// If the slice has another length.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        assert_eq!(Some(data.len()), rows.checked_mul(cols), "a matrix of {rows} x {cols}");
        Self { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// A matrix whose rows begin `stride` elements apart; the slice may end with the last row's elements.
    ///
    /// # Panics
    /// If the slice is too short.
    pub fn strided(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        let last = || (rows - 1).checked_mul(stride)?.checked_add(cols);
        let needed = if rows == 0 || cols == 0 { Some(0) } else { last() };
        let there = needed.is_some_and(|needed| needed <= data.len());
        assert!(there, "{rows} rows of {cols}, {stride} apart, in {} elements", data.len());
        Self { data, rows, cols, row_stride: stride, col_stride: 1 }
    }

    /// The transpose, without moving elements.
    #[must_use]
    pub fn t(self) -> Self {
        let Self { data, rows, cols, row_stride, col_stride } = self;
        Self { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }

    /// The rows in a range.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[must_use]
    pub fn rows(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        let start = (range.start * self.row_stride).min(self.data.len());
        Self { data: &self.data[start..], rows: range.len(), ..self }
    }

    /// Number of rows and columns.
    #[must_use]
    pub fn shape(self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Elements from one row to the next, and from one column to the next.
    #[must_use]
    pub fn strides(self) -> (usize, usize) {
        (self.row_stride, self.col_stride)
    }

    /// The slice, from the first element on.
    #[must_use]
    pub fn data(self) -> &'a [T] {
        self.data
    }
}

impl<'a, T: Element> Matrix<'a, T> {
    /// The matrix as f32, if its elements have that type.
    #[must_use]
    pub fn as_f32(self) -> Option<Matrix<'a>> {
        let Self { rows, cols, row_stride, col_stride, .. } = self;
        match T::data(self.data) {
            Data::F32(data) => Some(Matrix { data, rows, cols, row_stride, col_stride }),
            _ => None,
        }
    }
}
