//! A weight on the CPU, f32, bf16 or quantized, as a matrix, and its products with rows.

use crate::matmul::{Accumulate, Matrix, product};
use crate::number::{Number, convert};
use crate::quantized::{QuantizedMatrix, product_quantized, product_quantized_t};
use crate::slices::{elements_of, values};
use crate::weight::Weight;
use candle_core::{DType, Result};
use half::bf16;
use std::borrow::Cow;

/// A weight `[N, C]` of N outputs and C inputs, row by row.
#[derive(Debug, Clone, Copy)]
pub(crate) enum WeightMatrix<'a> {
    Dense(Matrix<'a>),
    Rounded(Matrix<'a, bf16>),
    Quantized(&'a QuantizedMatrix),
}

impl WeightMatrix<'_> {
    /// Calls `f` with the matrix of a weight.
    pub(crate) fn read<T>(weight: &Weight, f: impl FnOnce(WeightMatrix) -> Result<T>) -> Result<T> {
        match weight {
            Weight::Dense(tensor) => {
                let ((rows, columns), tensor) = (tensor.dims2()?, tensor.contiguous()?);
                match tensor.dtype() {
                    DType::BF16 => {
                        elements_of(&tensor, |weight| f(WeightMatrix::Rounded(Matrix::new(weight, rows, columns))))
                    }
                    _ => values(&tensor, |weight| f(WeightMatrix::Dense(Matrix::new(weight, rows, columns)))),
                }
            }
            Weight::Quantized(matrix) => f(WeightMatrix::Quantized(matrix)),
            Weight::Stack(_) => weight.expected_one_matrix(),
        }
    }

    /// The number N of outputs.
    pub(crate) fn rows(self) -> usize {
        match self {
            Self::Dense(weight) => weight.shape().0,
            Self::Rounded(weight) => weight.shape().0,
            Self::Quantized(weight) => weight.dims().0,
        }
    }

    /// Writes the outputs `[T, N]` of x `[T, C]`, whose rows are consecutive in memory.
    pub(crate) fn forward<T: Number>(self, x: Matrix<T>, out: &mut [f32]) {
        match self {
            Self::Dense(weight) => product(x, weight.t(), out, Accumulate::Overwrite),
            Self::Rounded(weight) => product(x, weight.t(), out, Accumulate::Overwrite),
            Self::Quantized(weight) => product_quantized_t(&wide_rows(x), weight, out),
        }
    }

    /// Writes the gradient `[T, C]` of x from that of the outputs `[T, N]`, whose rows are consecutive in memory.
    pub(crate) fn backward<T: Number>(self, dy: Matrix<T>, dx: &mut [T]) {
        match self {
            Self::Dense(weight) => T::product(dy, weight, dx),
            Self::Rounded(weight) => T::product(dy, weight, dx),
            Self::Quantized(weight) => T::write_sums(dx, |dx| product_quantized(&wide_rows(dy), weight, dx)),
        }
    }
}

/// The elements of a matrix whose rows are consecutive in memory, in f32.
fn wide_rows<T: Number>(matrix: Matrix<'_, T>) -> Cow<'_, [f32]> {
    let (rows, columns) = matrix.shape();
    match matrix.as_f32() {
        Some(matrix) => Cow::Borrowed(&matrix.data()[..rows * columns]),
        None => {
            let mut wide = vec![0.0; rows * columns];
            convert(&matrix.data()[..rows * columns], &mut wide);
            Cow::Owned(wide)
        }
    }
}
