//! Gradients of a product's left factor: one tile of the matrix is dequantized at a time, and multiplied like any f32 matrix.

use super::input::Input;
use super::matrix::QuantizedMatrix;
use crate::matmul::{Accumulate, Matrix, product};
use crate::pool;

/// Numbers in a tile: 4 MiB of f32, which are still in the cache when the product reads them.
const TILE: usize = 1 << 20;
/// The smallest number of rows in a tile; the product sums over rows.
const LEAST_ROWS: usize = 256;

/// The number of f32 values that the gradient of the tokens needs in addition to factors and results: a tile of the matrix of `rows` x
/// `columns`.
#[must_use]
pub fn backward_scratch(rows: usize, columns: usize) -> usize {
    height(columns).min(rows) * columns
}

/// Number of rows in a tile that has all of these columns.
fn height(columns: usize) -> usize {
    (TILE / columns.max(1)).max(LEAST_ROWS)
}

/// Writes `dy weight`: dy `[T, out]`, weight `[out, in]`, dx `[T, in]`.
pub(super) fn backward(dy: Input, weight: &QuantizedMatrix, dx: &mut [f32]) {
    let (rows, columns) = weight.dims();
    dx.fill(0.0);
    if dx.is_empty() {
        return;
    }
    let step = height(columns);
    let mut tile = pool::zeros(step.min(rows) * columns);
    for start in (0..rows).step_by(step) {
        let range = start..rows.min(start + step);
        let tile = &mut tile[..range.len() * columns];
        weight.decode(range.clone(), 0..columns, tile);
        product(dy.columns(range.clone()), Matrix::new(tile, range.len(), columns), dx, Accumulate::Add);
    }
}
