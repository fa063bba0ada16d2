//! Products with a few tokens whose codes are multiplied as they are unpacked, while they are in registers.

use super::ROWS;
use crate::quantized::blocks::{ArrangedActivations, Block};
use crate::quantized::input::Input;
use crate::quantized::lanes::{Lanes, VectorWork, dispatch};
use std::marker::PhantomData;

/// Rows of the matrix that take turns, so that factors in the L1 cache are read several times.
const GROUP: usize = 2 * ROWS;
/// How many factors of all tokens are multiplied with each row of a group: at most 24 KiB, most of an L1 cache.
const FACTORS: usize = 6144;

/// The largest number of tokens of x for [`in_registers`].
pub(super) fn most_tokens<B: Block<LEN>, const LEN: usize>() -> usize {
    dispatch(MostTokens::<B, LEN>(PhantomData))
}

struct MostTokens<B, const LEN: usize>(PhantomData<B>);

impl<B: Block<LEN>, const LEN: usize> VectorWork for MostTokens<B, LEN> {
    type Output = usize;

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) -> usize {
        B::tokens_in_registers::<L>()
    }
}

/// Arranges x, of at most [`most_tokens`], for [`in_registers`].
pub(super) fn arranged<B: Block<LEN>, const LEN: usize>(x: Input) -> ArrangedActivations {
    dispatch(Arrange::<B, LEN> { x, blocks: PhantomData })
}

struct Arrange<'a, B, const LEN: usize> {
    x: Input<'a>,
    blocks: PhantomData<B>,
}

impl<B: Block<LEN>, const LEN: usize> VectorWork for Arrange<'_, B, LEN> {
    type Output = ArrangedActivations;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> ArrangedActivations {
        B::arranged(l, self.x)
    }
}

/// Adds the products of x, of `width` columns, with the rows that are stored, one number of each token's out for each row.
pub(super) fn in_registers<B: Block<LEN>, const LEN: usize>(
    x: &ArrangedActivations,
    width: usize,
    stored: &[u8],
    out: Vec<&mut [f32]>,
) {
    dispatch(InRegisters::<B, LEN> { x, width, blocks: bytemuck::cast_slice(stored), out });
}

struct InRegisters<'a, B, const LEN: usize> {
    x: &'a ArrangedActivations,
    width: usize,
    blocks: &'a [B],
    out: Vec<&'a mut [f32]>,
}

impl<B: Block<LEN>, const LEN: usize> VectorWork for InRegisters<'_, B, LEN> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { x, width, blocks, mut out } = self;
        let blocks_per_row = width / LEN;
        for (at, group) in blocks.chunks(GROUP * blocks_per_row).enumerate() {
            let next = blocks.get((at + 1) * GROUP * blocks_per_row..).unwrap_or_default();
            Rows { blocks: group, next, blocks_per_row, first: at * GROUP }.multiply(l, x, &mut out);
        }
    }
}

/// A group of rows of the matrix.
struct Rows<'a, B, const LEN: usize> {
    blocks: &'a [B],
    /// The rows that follow, which are prefetched; there may be fewer.
    next: &'a [B],
    /// The number of blocks of a row.
    blocks_per_row: usize,
    /// The index of the first row.
    first: usize,
}

impl<B: Block<LEN>, const LEN: usize> Rows<'_, B, LEN> {
    /// Adds the products with x to out.
    #[inline(always)]
    fn multiply<L: Lanes>(self, l: L, x: &ArrangedActivations, out: &mut [&mut [f32]]) {
        match x.tokens {
            1 => self.multiply_each::<L, 1>(l, x, out),
            2 if const { L::TOKENS_IN_REGISTERS >= 2 } => self.multiply_each::<L, 2>(l, x, out),
            3 if const { L::TOKENS_IN_REGISTERS >= 3 } => self.multiply_each::<L, 3>(l, x, out),
            4 if const { L::TOKENS_IN_REGISTERS >= 4 } => self.multiply_each::<L, 4>(l, x, out),
            5 if const { L::TOKENS_IN_REGISTERS >= 5 } => self.multiply_each::<L, 5>(l, x, out),
            6 if const { L::TOKENS_IN_REGISTERS >= 6 } => self.multiply_each::<L, 6>(l, x, out),
            7 if const { L::TOKENS_IN_REGISTERS >= 7 } => self.multiply_each::<L, 7>(l, x, out),
            8 if const { L::TOKENS_IN_REGISTERS >= 8 } => self.multiply_each::<L, 8>(l, x, out),
            more => unreachable!("{more} tokens have sums in registers"),
        }
    }

    /// Does [`multiply`](Self::multiply) for T tokens.
    #[inline(always)]
    fn multiply_each<L: Lanes, const T: usize>(self, l: L, x: &ArrangedActivations, out: &mut [&mut [f32]]) {
        // Loops, since closures that iterators call would not be compiled for the instruction set.
        let rows = self.blocks.len() / self.blocks_per_row;
        // Fewer rows are summed in the same way, so that the bits of a product do not depend on the rows beside it.
        let mut sums = [[l.splat(0.0); T]; GROUP];
        let parts = if B::CAN_SPLIT_ROWS { self.blocks_per_row.div_ceil(FACTORS / (T * LEN)) } else { 1 };
        let part = self.blocks_per_row.div_ceil(parts);
        for start in (0..self.blocks_per_row).step_by(part) {
            let end = self.blocks_per_row.min(start + part);
            for (r, sums) in sums.iter_mut().take(rows).enumerate() {
                let part = r * self.blocks_per_row + start..r * self.blocks_per_row + end;
                let blocks = &self.blocks[part.clone()];
                // Where no row follows, this one is fetched twice, which costs nothing.
                let next = self.next.get(part).unwrap_or(blocks);
                B::add_dots(l, blocks, next, start, x, sums);
            }
        }
        assert_eq!(out.len(), T, "each token has its output");
        for (t, out) in out.iter_mut().enumerate() {
            let out = &mut out[self.first..self.first + rows];
            for (sums, out) in sums.chunks_exact(ROWS).zip(out.chunks_mut(ROWS)) {
                let sums = l.sums([sums[0][t], sums[1][t], sums[2][t], sums[3][t]]);
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out += sum;
                }
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

    /// [`InRegisters`] with an output of its own, `[T, rows]`.
    #[derive(Clone, Copy)]
    struct ProductsInRegisters<'a, B, const LEN: usize> {
        x: &'a [f32],
        width: usize,
        blocks: &'a [B],
    }

    impl<B: Block<LEN>, const LEN: usize> VectorWork for ProductsInRegisters<'_, B, LEN> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run<L: Lanes>(self, l: L) -> Vec<f32> {
            let Self { x, width, blocks } = self;
            let rows = blocks.len() * LEN / width;
            let mut out = vec![0.0; x.len() / width * rows];
            let most = B::tokens_in_registers::<L>();
            for (x, out) in x.chunks(most * width).zip(out.chunks_mut(most * rows)) {
                let x = Input::new(x, x.len() / width, width);
                let x = Arrange::<B, LEN> { x, blocks: PhantomData }.run(l);
                InRegisters { x: &x, width, blocks, out: out.chunks_exact_mut(rows).collect() }.run(l);
            }
            out
        }
    }

    fn in_registers<B: Block<LEN>, const LEN: usize>(x: &[f32], weight: &QuantizedMatrix) -> Vec<Vec<f32>> {
        let (rows, width) = weight.dims();
        let blocks = bytemuck::cast_slice(weight.bytes_of_rows(0..rows));
        on_each(ProductsInRegisters::<B, LEN> { x, width, blocks })
    }

    #[test]
    fn products_in_registers_have_the_bits_of_one_token_alone() -> candle_core::Result<()> {
        const ROWS: usize = GROUP + 3;
        for format in Format::ALL {
            const TOKENS: usize = 8;
            // More columns than are multiplied at once, which end within a vector where rows may.
            let width = FACTORS / TOKENS + if format.block_len() == 1 { 235 } else { 256 };
            let weight = matrix(format, ROWS, width)?;
            let decoded = weight.dequantize()?.flatten_all()?.to_vec1::<f32>()?;
            let x: Vec<f32> = (0..TOKENS * width).map(|i| (0.37 * i as f32).cos()).collect();
            let size: f32 = decoded.iter().map(|w| w.abs()).sum::<f32>() / ROWS as f32;
            let alone: Vec<Vec<Vec<f32>>> =
                x.chunks(width).map(|x| with_block!(format, in_registers(x, &weight))).collect();
            for tokens in 1..=TOKENS {
                let together = with_block!(format, in_registers(&x[..tokens * width], &weight));
                for (set, products) in together.iter().enumerate() {
                    for (t, products) in products.chunks(ROWS).enumerate() {
                        assert_eq!(products, alone[t][set], "{format}, token {t} of {tokens}");
                        for (row, product) in decoded.chunks(width).zip(products) {
                            let x = &x[t * width..];
                            let wanted: f64 = row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                            let wrong = (f64::from(*product) - wanted).abs();
                            assert!(wrong < 1e-6 * f64::from(size), "{format}, token {t}: {product}, not {wanted}");
                        }
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn one_token_of_more_columns_than_are_multiplied_at_once_has_the_product_of_f64() -> candle_core::Result<()> {
        for format in Format::ALL {
            let width = FACTORS + if format.block_len() == 1 { 235 } else { 256 };
            let weight = matrix(format, 3, width)?;
            let decoded = weight.dequantize()?.flatten_all()?.to_vec1::<f32>()?;
            let x: Vec<f32> = (0..width).map(|i| (0.37 * i as f32).cos()).collect();
            for products in with_block!(format, in_registers(&x, &weight)) {
                for (row, product) in decoded.chunks(width).zip(products) {
                    let terms = row.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                    let (wanted, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                    let wrong = (f64::from(product) - wanted).abs();
                    assert!(wrong < 1e-6 * size, "{format}: {product}, not {wanted}");
                }
            }
        }
        Ok(())
    }
}
