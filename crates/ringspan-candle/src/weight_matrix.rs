//! The matrix that a weight on the CPU is, f32 or quantized, and its products with rows.

use crate::matmul::{Into, Matrix, product};
use crate::quantized::{QuantizedMatrix, product_quantized, product_quantized_t};
use crate::slices::values;
use crate::weight::Weight;
use candle_core::Result;

/// A weight `[N, C]` of N outputs and C inputs, row after row.
#[derive(Debug, Clone, Copy)]
pub(crate) enum WeightMatrix<'a> {
    Dense(Matrix<'a>),
    Quantized(&'a QuantizedMatrix),
}

impl WeightMatrix<'_> {
    /// Calls `f` with the matrix that a weight is.
    pub(crate) fn read<T>(weight: &Weight, f: impl FnOnce(WeightMatrix) -> Result<T>) -> Result<T> {
        match weight {
            Weight::Dense(tensor) => {
                let (rows, columns) = tensor.dims2()?;
                values(&tensor.contiguous()?, |weight| f(WeightMatrix::Dense(Matrix::new(weight, rows, columns))))
            }
            Weight::Quantized(matrix) => f(WeightMatrix::Quantized(matrix)),
            Weight::Stack(_) => weight.one_matrix(),
        }
    }

    /// Outputs N.
    pub(crate) fn rows(self) -> usize {
        match self {
            Self::Dense(weight) => weight.shape().0,
            Self::Quantized(weight) => weight.dims().0,
        }
    }

    /// Writes the outputs `[T, N]` of x `[T, C]`, whose rows follow each other.
    pub(crate) fn forward(self, x: Matrix, out: &mut [f32]) {
        match self {
            Self::Dense(weight) => product(x, weight.t(), out, Into::Fresh),
            Self::Quantized(weight) => product_quantized_t(rows(x), weight, out),
        }
    }

    /// Writes the gradient `[T, C]` of x for that of the outputs `[T, N]`, whose rows follow each other.
    pub(crate) fn backward(self, dy: Matrix, dx: &mut [f32]) {
        match self {
            Self::Dense(weight) => product(dy, weight, dx, Into::Fresh),
            Self::Quantized(weight) => product_quantized(rows(dy), weight, dx),
        }
    }
}

/// The elements of a matrix whose rows follow each other.
fn rows(matrix: Matrix<'_>) -> &[f32] {
    let (rows, columns) = matrix.shape();
    &matrix.data()[..rows * columns]
}
