//! Products with many tokens: one tile of the matrix is decoded at a time, and multiplied like any f32 matrix.

use super::input::Input;
use super::matrix::QuantizedMatrix;
use crate::matmul::{Accumulate, Matrix, product};
use crate::pool;
use ringspan::kernel::product::MOST_PACKED;
use std::ops::Range;

/// Numbers in a tile: 4 MiB of f32, which are still in the cache when the product reads them.
const TILE: usize = 1 << 20;
/// Number of columns of a forward tile, a multiple of the block length of every format. Each tile adds one partial sum to the output, so
/// this must not depend on the number of rows: then some rows of a matrix have the same bits alone as with all others.
const COLUMNS: usize = 512;
/// The largest number of rows in a tile.
const ROWS: usize = 1 << 14;
/// The smallest number of rows in a tile of the backward pass, which sums over rows.
const SUMMED: usize = 256;

/// The number of f32 values that the product of `tokens` tokens with a matrix of `rows` x `columns` needs in addition to factors
/// and results: a tile of the matrix, decoded and packed, and, for a matrix with many rows, sums.
#[must_use]
pub fn forward_scratch(tokens: usize, rows: usize, columns: usize) -> usize {
    let group = group(rows);
    let sums = if rows > ROWS { tokens * group } else { 0 };
    let tile = group * COLUMNS.min(columns);
    sums + tile + tile.min(MOST_PACKED)
}

/// Like [`forward_scratch`], for the gradient of the tokens: a tile of the matrix, decoded.
#[must_use]
pub fn backward_scratch(rows: usize, columns: usize) -> usize {
    height(columns).min(rows) * columns
}

/// Number of rows that are multiplied together in the forward pass.
fn group(rows: usize) -> usize {
    rows.div_ceil(rows.div_ceil(ROWS).max(1))
}

/// Number of rows in a tile that has all of these columns.
fn height(columns: usize) -> usize {
    (TILE / columns.max(1)).max(SUMMED)
}

/// Adds `x weight^T` to out: x `[T, in]`, weight `[out, in]`, out `[T, out]`.
///
/// A tile has some columns of all rows, since the product packs x again for each range of rows.
pub(super) fn add_forward(x: Input, weight: &QuantizedMatrix, out: &mut [f32]) {
    let rows = weight.dims().0;
    if rows <= ROWS {
        return add_rows(x, weight, 0..rows, out);
    }
    let group = group(rows);
    let mut sums = pool::zeros(x.tokens * group);
    for start in (0..rows).step_by(group) {
        let range = start..rows.min(start + group);
        let sums = &mut sums[..x.tokens * range.len()];
        sums.fill(0.0);
        add_rows(x, weight, range.clone(), sums);
        let part = pool::part(x.tokens, range.len());
        let parts = out.chunks_mut(part * rows).zip(sums.chunks(part * range.len())).collect();
        pool::map(parts, |(out, sums): (&mut [f32], &[f32])| {
            for (out, sums) in out.chunks_exact_mut(rows).zip(sums.chunks_exact(range.len())) {
                out[range.clone()].iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
            }
        });
    }
}

/// Like [`add_forward`], for a range of the weight's rows: out `[T, rows]`.
fn add_rows(x: Input, weight: &QuantizedMatrix, rows: Range<usize>, out: &mut [f32]) {
    let columns = weight.dims().1;
    if out.is_empty() {
        return;
    }
    let mut tile = pool::zeros(rows.len() * COLUMNS.min(columns));
    for start in (0..columns).step_by(COLUMNS) {
        let range = start..columns.min(start + COLUMNS);
        let tile = &mut tile[..rows.len() * range.len()];
        weight.decode(rows.clone(), range.clone(), tile);
        product(x.columns(range.clone()), Matrix::new(tile, rows.len(), range.len()).t(), out, Accumulate::Add);
    }
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
