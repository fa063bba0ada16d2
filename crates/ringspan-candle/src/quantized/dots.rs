//! Products with a few tokens, as in generation: blocks are decoded and multiplied in registers, or decoded into the L1 cache and
//! multiplied there, whichever is faster.

mod in_l1_cache;
mod in_registers;

use super::blocks::with_block;
use super::input::Input;
use super::matrix::QuantizedMatrix;
use crate::pool;
use in_l1_cache::{in_l1_cache, packed};
use in_registers::{arranged, in_registers, most_tokens};
use std::ops::Range;

/// The largest number of tokens for which these products are used, which are faster than packing the weight even with that many. Products
/// with the packed weight have the same bits as products with the decoded weight, so training with more tokens gives the same bits on
/// quantized weights as on decoded ones.
pub(super) const MAX_TOKENS: usize = 128;
/// Rows of the matrix whose sums are completed together.
const ROWS: usize = 4;

/// Adds `x weight^T` to out: x `[T, in]`, weight `[out, in]`, out `[T, out]`.
pub(super) fn add_forward(x: Input, weight: &QuantizedMatrix, out: &mut [f32]) {
    let (rows, columns) = weight.dims();
    if columns == 0 || out.is_empty() {
        return;
    }
    let ranges = pool::parts(rows, columns);
    let outs = split_columns(out, rows, &ranges);
    let parts: Vec<_> = ranges.into_iter().zip(outs).collect();
    if x.tokens <= with_block!(weight.format(), most_tokens()) {
        let x = with_block!(weight.format(), arranged(x));
        pool::map(parts, |(range, out): (Range<usize>, _)| {
            with_block!(weight.format(), in_registers(&x, columns, weight.bytes_of_rows(range), out));
        });
    } else {
        let x = with_block!(weight.format(), packed(x));
        pool::map(parts, |(range, out): (Range<usize>, _)| {
            with_block!(weight.format(), in_l1_cache(&x, weight.bytes_of_rows(range), out));
        });
    }
}

/// The numbers of each range of columns: of each row of a matrix those of the range.
pub(super) fn split_columns<'a>(
    matrix: &'a mut [f32],
    width: usize,
    ranges: &[Range<usize>],
) -> Vec<Vec<&'a mut [f32]>> {
    let mut columns: Vec<Vec<&mut [f32]>> = ranges.iter().map(|_| Vec::with_capacity(matrix.len() / width)).collect();
    for mut row in matrix.chunks_exact_mut(width) {
        for (columns, range) in columns.iter_mut().zip(ranges) {
            let (part, rest) = row.split_at_mut(range.len());
            columns.push(part);
            row = rest;
        }
    }
    columns
}
