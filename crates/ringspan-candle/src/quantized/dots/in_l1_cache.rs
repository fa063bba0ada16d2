//! Products with a few tokens whose rows of the weight are decoded into the L1 cache, and multiplied there.
//!
//! Four rows are multiplied together, one piece of their columns after the other. Where there are registers left, the next piece is
//! decoded between the products of this one: so the processor decodes while it would otherwise wait for products.

mod pieces;
mod tile;

use super::ROWS;
use crate::pool;
use crate::quantized::blocks::Block;
use crate::quantized::input::Input;
use crate::quantized::lanes::{Lanes, VectorWork, dispatch};
use bytemuck::Zeroable;
use pieces::{WeightPiece, WeightPieces};
use tile::{Columns, MAX_TOKENS, NextRows, Sums, Tile};

/// The most columns that are decoded at once. Two pieces of four rows, one that is multiplied and one that is decoded, and the same columns
/// of four tokens take 36 KiB, most of an L1 cache.
const MAX_COLUMNS: usize = 768;

/// Adds the products of x with the rows that are stored, one number of each token's out for each row.
pub(super) fn in_l1_cache<B: Block<LEN>, const LEN: usize>(x: &PackedTokens, stored: &[u8], out: Vec<&mut [f32]>) {
    dispatch(InL1Cache::<B, LEN> { x, blocks: bytemuck::cast_slice(stored), out });
}

/// Packs x for products with blocks of LEN numbers.
pub(super) fn packed<B: Block<LEN>, const LEN: usize>(x: Input) -> PackedTokens {
    let pieces = x.width.div_ceil(MAX_COLUMNS);
    // Whole blocks and whole vectors.
    let columns = x.width.div_ceil(pieces).next_multiple_of(LEN.max(32));
    let mut packed = vec![Columns::zeroed(); x.tokens * x.width.div_ceil(columns)];
    let part = pool::part(x.tokens, columns);
    let parts = packed.chunks_mut(x.tokens).enumerate().flat_map(|(piece, tokens)| {
        tokens.chunks_mut(part).enumerate().map(move |(index, tokens)| (piece * columns, index * part, tokens))
    });
    pool::map(parts.collect(), |(column, token, to): (usize, usize, &mut [Columns])| {
        for (token, to) in (token..).zip(to) {
            let from = &x.row(token)[column..x.width.min(column + columns)];
            bytemuck::cast_slice_mut(to)[..from.len()].copy_from_slice(from);
        }
    });
    PackedTokens { packed, tokens: x.tokens, width: x.width, columns }
}

/// The rows of x, all tokens' first pieces before their second ones. x is copied because its rows may compete for the same few sets of the
/// L1 cache: rows of 2,048 columns are 8 KB apart. Zeros follow the last column.
pub(super) struct PackedTokens {
    packed: Vec<Columns>,
    tokens: usize,
    width: usize,
    /// The columns of each piece but the last.
    columns: usize,
}

struct InL1Cache<'a, B, const LEN: usize> {
    x: &'a PackedTokens,
    blocks: &'a [B],
    out: Vec<&'a mut [f32]>,
}

impl<B: Block<LEN>, const LEN: usize> VectorWork for InL1Cache<'_, B, LEN> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { x, blocks, mut out } = self;
        let ahead = tile::decodes::<L>(x.tokens.min(MAX_TOKENS));
        // The next rows are distributed over the tiles of these tokens. Where tiles decode them, those are the whole ones.
        let sharing = if ahead { x.tokens / MAX_TOKENS * MAX_TOKENS } else { x.tokens };
        let mut buffers = [[Columns::zeroed(); ROWS]; 2];
        let [decoded, next] = &mut buffers;
        let (mut decoded, mut next) = (decoded, next);
        let mut sums = vec![[l.splat(0.0); ROWS]; x.tokens];
        let mut pieces = WeightPieces::new(blocks, x.width / LEN, x.columns / LEN);
        let (mut upcoming, mut following) = (pieces.next(), pieces.next());
        if ahead && let Some(piece) = &upcoming {
            tile::decode(l, &piece.rows, next);
        }
        while let Some(piece) = upcoming {
            (upcoming, following) = (following, pieces.next());
            if ahead {
                std::mem::swap(&mut decoded, &mut next);
            } else {
                tile::decode(l, &piece.rows, decoded);
            }
            let vectors = x.columns.min(x.width - piece.index_in_row * x.columns).div_ceil(16);
            let x_piece = &x.packed[piece.index_in_row * x.tokens..][..x.tokens];
            let [blocks, following] = [&upcoming, &following].map(WeightPiece::rows_of);
            let (mut first, mut shared) = (0, 0);
            while first < x.tokens {
                let tokens = tile::next_tokens::<L>(x.tokens - first);
                let start = shared;
                while shared * sharing < ROWS * sharing.min(first + tokens) {
                    shared += 1;
                }
                let rows = NextRows {
                    to: &mut next[start..shared],
                    blocks: &blocks[start..shared],
                    following: &following[start..shared],
                };
                let tile = Tile { x: &x_piece[first..], decoded, vectors };
                let mut sums = Sums {
                    so_far: &mut sums[first..],
                    is_first: piece.index_in_row == 0,
                    is_last: piece.is_last_in_row,
                    out: &mut out[first..],
                    first_row: piece.first_row,
                };
                match tokens {
                    4 => tile.add_products::<L, B, LEN, 4>(l, &mut sums, rows),
                    3 => tile.add_products::<L, B, LEN, 3>(l, &mut sums, rows),
                    2 => tile.add_products::<L, B, LEN, 2>(l, &mut sums, rows),
                    _ => tile.add_products::<L, B, LEN, 1>(l, &mut sums, rows),
                }
                first += tokens;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantized::blocks::with_block;
    use crate::quantized::lanes::on_each;
    use crate::quantized::tests::matrix;
    use crate::quantized::{Format, QuantizedMatrix};

    /// [`InL1Cache`] with an output of its own, `[T, rows]`.
    #[derive(Clone, Copy)]
    struct Products<'a, B, const LEN: usize> {
        x: &'a PackedTokens,
        blocks: &'a [B],
    }

    impl<B: Block<LEN>, const LEN: usize> VectorWork for Products<'_, B, LEN> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run<L: Lanes>(self, l: L) -> Vec<f32> {
            let Self { x, blocks } = self;
            let rows = blocks.len() * LEN / x.width;
            let mut out = vec![0.0; x.tokens * rows];
            InL1Cache { x, blocks, out: out.chunks_exact_mut(rows).collect() }.run(l);
            out
        }
    }

    fn products<B: Block<LEN>, const LEN: usize>(x: Input, weight: &QuantizedMatrix) -> Vec<Vec<f32>> {
        let blocks = bytemuck::cast_slice(weight.bytes_of_rows(0..weight.dims().0));
        on_each(Products::<B, LEN> { x: &packed::<B, LEN>(x), blocks })
    }

    #[test]
    fn every_instruction_set_multiplies_tokens_as_if_each_were_one_of_others() -> candle_core::Result<()> {
        const ROWS: usize = 7;
        // Whole tiles and one of each other size.
        const MOST: usize = 11;
        // One piece of a row, two and three; the last one may be narrower, and those of bf16 end within a vector.
        for (format, width) in [
            (Format::Q4_0, 608),
            (Format::Q5K, 256),
            (Format::Q8_0, 1376),
            (Format::Q6K, 1792),
            (Format::Q4K, 2304),
            (Format::BF16, 17),
            (Format::BF16, 1557),
        ] {
            let weight = matrix(format, ROWS, width)?;
            let decoded = weight.dequantize()?.flatten_all()?.to_vec1::<f32>()?;
            let x: Vec<f32> = (0..MOST * width).map(|i| (0.37 * i as f32).cos()).collect();
            let of_first = |tokens: usize| {
                let x = Input::new(&x[..tokens * width], tokens, width);
                with_block!(format, products(x, &weight))
            };
            let size: f32 = decoded.iter().map(|w| w.abs()).sum::<f32>() / ROWS as f32;
            let wanted: Vec<f64> = x
                .chunks(width)
                .flat_map(|x| {
                    decoded
                        .chunks(width)
                        .map(move |row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum())
                })
                .collect();
            let all = of_first(MOST);
            for got in &all {
                for (got, wanted) in got.iter().zip(&wanted) {
                    let wrong = (f64::from(*got) - wanted).abs();
                    assert!(wrong < 1e-6 * f64::from(size), "{format}, {width} columns: {got}, not {wanted}");
                }
            }
            for tokens in 1..MOST {
                for (few, all) in of_first(tokens).iter().zip(&all) {
                    assert_eq!(few, &all[..tokens * ROWS], "{format}, {width} columns, {tokens} tokens");
                }
            }
        }
        Ok(())
    }
}
