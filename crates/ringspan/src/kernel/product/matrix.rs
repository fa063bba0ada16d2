//! Matrices in slices.

use super::super::view::Data;
use half::bf16;
use std::ops::Range;

/// A type of a factor's elements: `f32` or `bf16`.
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

/// A matrix in a slice, by its strides: the elements of its rows follow each other, or those of its columns do.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a, T = f32> {
    pub(super) data: &'a [T],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// Row after row.
    ///
    /// # Panics
    /// A slice of another length.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        assert_eq!(Some(data.len()), rows.checked_mul(cols), "a matrix of {rows} x {cols}");
        Self { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// Rows that begin `stride` elements apart, of which the last may end with its elements.
    ///
    /// # Panics
    /// A slice that is too short.
    pub fn strided(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        let last = || (rows - 1).checked_mul(stride)?.checked_add(cols);
        let needed = if rows == 0 || cols == 0 { Some(0) } else { last() };
        let there = needed.is_some_and(|needed| needed <= data.len());
        assert!(there, "{rows} rows of {cols}, {stride} apart, in {} elements", data.len());
        Self { data, rows, cols, row_stride: stride, col_stride: 1 }
    }

    /// The transpose: no element moves.
    #[must_use]
    pub fn t(self) -> Self {
        let Self { data, rows, cols, row_stride, col_stride } = self;
        Self { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }

    /// Some of the rows.
    ///
    /// # Panics
    /// Rows that are not there.
    #[must_use]
    pub fn rows(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        let start = (range.start * self.row_stride).min(self.data.len());
        Self { data: &self.data[start..], rows: range.len(), ..self }
    }

    /// Rows and columns.
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
    /// The same in f32, if its elements are.
    #[must_use]
    pub fn as_f32(self) -> Option<Matrix<'a>> {
        let Self { rows, cols, row_stride, col_stride, .. } = self;
        match T::data(self.data) {
            Data::F32(data) => Some(Matrix { data, rows, cols, row_stride, col_stride }),
            _ => None,
        }
    }
}
