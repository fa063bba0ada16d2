//! Products with a few tokens, as in generation: blocks are decoded and multiplied in registers, or decoded into the L1 cache and
//! multiplied there, whichever is faster.

mod in_l1_cache;
mod in_registers;

use super::blocks::with_block;
use super::input::Input;
use super::lanes::{Lanes, VectorWork, dispatch};
use super::matrix::QuantizedMatrix;
use crate::pool;
use in_l1_cache::{in_l1_cache, packed};
use in_registers::{arranged, in_registers, most_tokens};
use std::ops::Range;

/// The largest number of tokens for these products. Up to about 160 they are faster than tiles. Products by tiles have the bits of
/// those with the decoded weight, so that training with more tokens than these beside stored weights is training beside the decoded ones.
pub(super) const FEW: usize = 128;
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
    let most = if dispatch(SeveralInRegisters) { with_block!(weight.format(), most_tokens()) } else { 1 };
    if x.tokens <= most {
        let x = with_block!(weight.format(), arranged(x));
        pool::map(parts, |(range, out): (Range<usize>, _)| {
            with_block!(weight.format(), in_registers(&x, columns, weight.bytes_of_rows(range), out));
        });
    } else {
        let x = packed(x);
        pool::map(parts, |(range, out): (Range<usize>, _)| {
            with_block!(weight.format(), in_l1_cache(&x, columns, weight.bytes_of_rows(range), out));
        });
    }
}

/// [`Lanes::SEVERAL_IN_REGISTERS`] of this machine.
struct SeveralInRegisters;

impl VectorWork for SeveralInRegisters {
    type Output = bool;

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) -> bool {
        L::SEVERAL_IN_REGISTERS
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
