//! Products with a few tokens, as in generation: for one token, blocks are decoded and multiplied in registers; for several
//! tokens, they are decoded into the L1 cache and multiplied there.

use super::blocks::{Block, padded, with_block};
use super::input::Input;
use super::lanes::{Lanes, VectorWork, dispatch};
use super::matrix::QuantizedMatrix;
use crate::pool;

/// The largest number of tokens for these products. With twice as many, tiles are nearly as fast (`--bench quantized --
/// tokens=64`).
pub(super) const FEW: usize = 32;
/// Columns that are decoded at once, which are whole blocks in all formats.
const CHUNK: usize = 256;
/// Rows of the matrix that are multiplied together: a vector of x is read once for all of them.
const TOGETHER: usize = 4;

/// Adds `x weight^T` to out: x `[T, in]`, weight `[out, in]`, out `[T, out]`.
pub(super) fn add_forward(x: Input, weight: &QuantizedMatrix, out: &mut [f32]) {
    let (rows, columns) = weight.dims();
    if columns == 0 || out.is_empty() {
        return;
    }
    let parts = pool::map(pool::parts(rows, columns), |range| {
        let sums = with_block!(weight.format(), dots(x, weight.bytes_of_rows(range.clone())));
        (range, sums)
    });
    for (range, sums) in parts {
        for (out, sums) in out.chunks_exact_mut(rows).zip(sums.chunks_exact(range.len())) {
            out[range.clone()].iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
        }
    }
}

/// The products of x with the rows whose bytes are given: `[T, rows]`.
fn dots<B: Block<LEN>, const LEN: usize>(x: Input, rows: &[u8]) -> Vec<f32> {
    dispatch(Dots::<B, LEN> { x, blocks: bytemuck::cast_slice(rows) })
}

/// Decoded columns of a row, aligned to a cache line: a vector across two cache lines takes twice as long to load.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Chunk([f32; CHUNK]);

struct Dots<'a, B, const LEN: usize> {
    x: Input<'a>,
    /// The blocks of the rows.
    blocks: &'a [B],
}

impl<B: Block<LEN>, const LEN: usize> VectorWork for Dots<'_, B, LEN> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> Vec<f32> {
        let Self { x, blocks } = self;
        let of_row = x.width / LEN;
        let rows = blocks.len() / of_row;
        let mut out = vec![0.0; x.tokens * rows];
        if x.tokens == 1 {
            // A loop, since closures that iterators call would not be compiled for the instruction set.
            for (out, row) in out.iter_mut().zip(blocks.chunks_exact(of_row)) {
                *out = l.sum(B::dot(l, row, x.row(0)));
            }
            return out;
        }
        let mut decoded = [Chunk([0.0; CHUNK]); TOGETHER];
        let mut sums = vec![[l.splat(0.0); TOGETHER]; x.tokens];
        for first in (0..rows).step_by(TOGETHER) {
            // There may be fewer rows at the end; what the other buffers then hold is not used.
            let together = TOGETHER.min(rows - first);
            sums.fill([l.splat(0.0); TOGETHER]);
            for start in (0..x.width).step_by(CHUNK) {
                let width = CHUNK.min(x.width - start);
                for (row, Chunk(decoded)) in decoded.iter_mut().take(together).enumerate() {
                    let blocks = &blocks[(first + row) * of_row + start / LEN..][..width / LEN];
                    B::decode(l, blocks, &mut decoded[..width]);
                    // The last vector is multiplied as a whole, so its rest is filled with zeros.
                    decoded[width..width.next_multiple_of(16)].fill(0.0);
                }
                for (token, sums) in sums.iter_mut().enumerate() {
                    *sums = add_products(l, &decoded, &x.row(token)[start..][..width], *sums);
                }
            }
            for (token, sums) in sums.iter().enumerate() {
                for (row, sum) in sums.iter().take(together).enumerate() {
                    out[token * rows + first + row] = l.sum(*sum);
                }
            }
        }
        out
    }
}

/// Adds the products of x with as many numbers of each row to the sums of that row.
#[inline(always)]
fn add_products<L: Lanes>(l: L, rows: &[Chunk; TOGETHER], x: &[f32], mut sums: [L::F; TOGETHER]) -> [L::F; TOGETHER] {
    let rows = rows.each_ref().map(|row| row.0.as_chunks::<16>().0);
    let (vectors, rest) = x.as_chunks::<16>();
    for (i, x) in vectors.iter().enumerate() {
        let x = l.load(x);
        for (sum, row) in sums.iter_mut().zip(&rows) {
            *sum = l.mul_add(l.load(&row[i]), x, *sum);
        }
    }
    if !rest.is_empty() {
        let x = l.load(&padded(rest));
        for (sum, row) in sums.iter_mut().zip(&rows) {
            *sum = l.mul_add(l.load(&row[vectors.len()]), x, *sum);
        }
    }
    sums
}
