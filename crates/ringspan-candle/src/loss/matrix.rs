//! The matrix of an output head on the CPU: f32, or quantized.

use crate::matmul::{Into, Matrix, product};
use crate::quantized::{QuantizedMatrix, product_quantized, product_quantized_t};
use crate::slices::values;
use crate::weight::Weight;
use candle_core::Result;

/// `[V, C]`, row after row.
#[derive(Debug, Clone, Copy)]
pub(super) enum HeadMatrix<'a> {
    Dense(Matrix<'a>),
    Quantized(&'a QuantizedMatrix),
}

impl HeadMatrix<'_> {
    /// Calls `f` with the matrix that a weight is.
    pub(super) fn read<T>(weight: &Weight, f: impl FnOnce(HeadMatrix) -> Result<T>) -> Result<T> {
        match weight {
            Weight::Dense(tensor) => {
                let (rows, columns) = tensor.dims2()?;
                values(&tensor.contiguous()?, |head| f(HeadMatrix::Dense(Matrix::new(head, rows, columns))))
            }
            Weight::Quantized(matrix) => f(HeadMatrix::Quantized(matrix)),
        }
    }

    /// Rows V.
    pub(super) fn rows(self) -> usize {
        match self {
            Self::Dense(head) => head.shape().0,
            Self::Quantized(head) => head.dims().0,
        }
    }

    /// Writes the logits `[T, V]` of hidden `[T, C]`, whose rows follow each other.
    pub(super) fn logits(self, hidden: Matrix, logits: &mut [f32]) {
        match self {
            Self::Dense(head) => product(hidden, head.t(), logits, Into::Fresh),
            Self::Quantized(head) => product_quantized_t(rows(hidden), head, logits),
        }
    }

    /// Writes the gradient `[T, C]` of hidden for that of the logits `[T, V]`, whose rows follow each other.
    pub(super) fn backward(self, d_logits: Matrix, d_hidden: &mut [f32]) {
        match self {
            Self::Dense(head) => product(d_logits, head, d_hidden, Into::Fresh),
            Self::Quantized(head) => product_quantized(rows(d_logits), head, d_hidden),
        }
    }
}

/// The elements of a matrix whose rows follow each other.
fn rows(matrix: Matrix<'_>) -> &[f32] {
    let (rows, columns) = matrix.shape();
    &matrix.data()[..rows * columns]
}
