//! Products with a few tokens whose rows of the weight are decoded into the L1 cache, and multiplied there.

use super::ROWS;
use crate::quantized::blocks::Block;
use crate::quantized::input::Input;
use crate::quantized::lanes::{Lanes, VectorWork, dispatch};
use bytemuck::AnyBitPattern;
use ringspan::kernel::prefetch;

/// Columns that are decoded at once, whole blocks in all formats.
pub(super) const COLUMNS: usize = 512;
/// Rows of at most this many columns are decoded in one piece: a short second piece takes longer than a longer first one.
pub(super) const COLUMNS_OF_SHORT_ROWS: usize = 768;

/// Adds the products of packed x, of `width` columns, with the rows that are stored, one number of each token's out for each row.
pub(super) fn in_l1_cache<B: Block<LEN>, const LEN: usize, const C: usize>(
    x: &[Chunk<C>],
    width: usize,
    stored: &[u8],
    out: Vec<&mut [f32]>,
) {
    dispatch(InL1Cache::<B, LEN, C> { x, width, blocks: bytemuck::cast_slice(stored), out });
}

/// Columns of one row, aligned to a cache line: a vector across two cache lines takes twice as long to load.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Chunk<const C: usize>([f32; C]);

impl<const C: usize> Chunk<C> {
    const ZERO: Self = Self([0.0; C]);

    #[inline(always)]
    fn vectors(&self) -> &[[f32; 16]] {
        self.0.as_chunks().0
    }
}

/// The rows of x in chunks, all tokens' first chunks before their second ones. x is copied because its rows may compete for the same few
/// sets of the L1 cache: rows of 2,048 columns are 8 KB apart. Zeros follow the last column.
pub(super) fn packed<const C: usize>(x: Input) -> Vec<Chunk<C>> {
    let mut packed = vec![Chunk::ZERO; x.tokens * x.width.div_ceil(C)];
    for token in 0..x.tokens {
        for (chunk, from) in x.row(token).chunks(C).enumerate() {
            packed[chunk * x.tokens + token].0[..from.len()].copy_from_slice(from);
        }
    }
    packed
}

struct InL1Cache<'a, B, const LEN: usize, const C: usize> {
    x: &'a [Chunk<C>],
    width: usize,
    blocks: &'a [B],
    out: Vec<&'a mut [f32]>,
}

impl<B: Block<LEN>, const LEN: usize, const C: usize> VectorWork for InL1Cache<'_, B, LEN, C> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { x, width, blocks, mut out } = self;
        let (tokens, blocks_per_row) = (out.len(), width / LEN);
        let rows = blocks.len() / blocks_per_row;
        let mut decoded = [Chunk::ZERO; ROWS];
        let mut sums = vec![[l.splat(0.0); ROWS]; tokens];
        for first in (0..rows).step_by(ROWS) {
            // There may be fewer rows at the end; what the other chunks then hold is not used.
            let together = ROWS.min(rows - first);
            sums.fill([l.splat(0.0); ROWS]);
            for (start, x) in (0..width).step_by(C).zip(x.chunks_exact(tokens)) {
                let width = C.min(width - start);
                let mut next: [&[B]; ROWS] = [&[]; ROWS];
                for (row, Chunk(decoded)) in decoded.iter_mut().take(together).enumerate() {
                    let at = (first + row) * blocks_per_row + start / LEN;
                    B::decode(l, &blocks[at..at + width / LEN], &mut decoded[..width]);
                    // The reads alternate between rows, which hardware prefetchers do not follow. So the next columns of this row are
                    // prefetched or, at its end, the first columns of the row that takes its place in the next group.
                    let (from, columns) = match self.width - start - width {
                        0 => (at + width / LEN + (ROWS - 1) * blocks_per_row, self.width),
                        left => (at + width / LEN, left),
                    };
                    next[row] = &blocks[from.min(blocks.len())..(from + columns.min(C) / LEN).min(blocks.len())];
                    // The last vector is multiplied as a whole, so its rest is filled with zeros.
                    decoded[width..width.next_multiple_of(16)].fill(0.0);
                }
                add_products(l, x, &decoded, width.div_ceil(16), &mut sums, next);
            }
            for (out, sums) in out.iter_mut().zip(&sums) {
                let sums = l.sums(*sums);
                match out[first..].first_chunk_mut::<ROWS>() {
                    // All four are added by one instruction.
                    Some(out) => {
                        for r in 0..ROWS {
                            out[r] += sums[r];
                        }
                    }
                    None => out[first..].iter_mut().zip(sums).for_each(|(out, sum)| *out += sum),
                }
            }
        }
    }
}

/// Adds the products of x with decoded rows to the sums of each token: for as many tokens at once as there are registers for, so that
/// each vector that is loaded is multiplied several times. The order of a sum does not depend on the number of tokens. The blocks that are
/// decoded `next` are prefetched meanwhile, a part with each tile: if all were asked for at once, decoding would wait for them.
#[inline(always)]
fn add_products<L: Lanes, B: AnyBitPattern, const C: usize>(
    l: L,
    x: &[Chunk<C>],
    rows: &[Chunk<C>; ROWS],
    vectors: usize,
    sums: &mut [[L::F; ROWS]],
    next: [&[B]; ROWS],
) {
    assert_eq!(x.len(), sums.len(), "each token has its sums");
    let tokens = x.len();
    let (mut x, mut sums, mut prefetched) = (x, sums, 0);
    while !x.is_empty() {
        let tile = tile::<L>(x.len());
        while prefetched * tokens < ROWS * (tokens - x.len() + tile) {
            prefetch(next[prefetched]);
            prefetched += 1;
        }
        match tile {
            4 => add_tile::<L, 4, C>(l, x, rows, vectors, sums),
            3 => add_tile::<L, 3, C>(l, x, rows, vectors, sums),
            2 => add_tile::<L, 2, C>(l, x, rows, vectors, sums),
            _ => add_tile::<L, 1, C>(l, x, rows, vectors, sums),
        }
        (x, sums) = (&x[tile..], &mut sums[tile..]);
    }
}

/// The number of tokens that are multiplied at once if there are `tokens` left.
#[inline(always)]
fn tile<L: Lanes>(tokens: usize) -> usize {
    match tokens {
        4.. if L::REGISTERS >= 32 => 4,
        // Four are taken as two and two: the sums of one token alone would wait for each other.
        3 | 5.. if L::REGISTERS < 32 => 3,
        2.. => 2,
        _ => 1,
    }
}

/// Does [`add_products`] for the first T tokens.
#[inline(always)]
fn add_tile<L: Lanes, const T: usize, const C: usize>(
    l: L,
    x: &[Chunk<C>],
    rows: &[Chunk<C>; ROWS],
    vectors: usize,
    sums: &mut [[L::F; ROWS]],
) {
    let x: [&[[f32; 16]]; T] = std::array::from_fn(|t| &x[t].vectors()[..vectors]);
    let rows: [&[[f32; 16]]; ROWS] = std::array::from_fn(|r| &rows[r].vectors()[..vectors]);
    if let Some(sums) = sums.first_chunk_mut() {
        l.add_products(x, rows, sums);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantized::blocks::{BF16, Q4_0, Q8_0};
    use crate::quantized::lanes::on_each;
    use crate::quantized::tests::matrix;
    use crate::quantized::{Format, QuantizedMatrix};

    /// [`InL1Cache`] with an output of its own, `[T, rows]`.
    #[derive(Clone, Copy)]
    struct Products<'a, B, const LEN: usize, const C: usize> {
        x: &'a [Chunk<C>],
        tokens: usize,
        width: usize,
        blocks: &'a [B],
    }

    impl<B: Block<LEN>, const LEN: usize, const C: usize> VectorWork for Products<'_, B, LEN, C> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run<L: Lanes>(self, l: L) -> Vec<f32> {
            let Self { x, tokens, width, blocks } = self;
            let rows = blocks.len() * LEN / width;
            let mut out = vec![0.0; tokens * rows];
            InL1Cache { x, width, blocks, out: out.chunks_exact_mut(rows).collect() }.run(l);
            out
        }
    }

    fn products<B: Block<LEN>, const LEN: usize, const C: usize>(x: Input, weight: &QuantizedMatrix) -> Vec<Vec<f32>> {
        let (rows, width) = weight.dims();
        let blocks = bytemuck::cast_slice(weight.bytes_of_rows(0..rows));
        on_each(Products::<B, LEN, C> { x: &packed(x), tokens: x.tokens, width, blocks })
    }

    #[test]
    fn every_instruction_set_multiplies_tokens_as_if_each_were_one_of_others() -> candle_core::Result<()> {
        const ROWS: usize = 7;
        const MOST: usize = 9;
        // Two pieces of a row, and for Q4_0 one; those of bf16 end within a vector.
        for (format, width) in [(Format::Q8_0, 608), (Format::Q4_0, 608), (Format::BF16, 517)] {
            let weight = matrix(format, ROWS, width)?;
            let decoded = weight.dequantize()?.flatten_all()?.to_vec1::<f32>()?;
            let x: Vec<f32> = (0..MOST * width).map(|i| (0.37 * i as f32).cos()).collect();
            let of_first = |tokens: usize| {
                let x = Input::new(&x[..tokens * width], tokens, width);
                match format {
                    Format::BF16 => products::<BF16, 1, COLUMNS>(x, &weight),
                    Format::Q4_0 => products::<Q4_0, 32, COLUMNS_OF_SHORT_ROWS>(x, &weight),
                    _ => products::<Q8_0, 32, COLUMNS>(x, &weight),
                }
            };
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
                let wrong = got.iter().zip(&wanted).map(|(got, wanted)| (f64::from(*got) - wanted).abs());
                assert!(wrong.fold(0.0, f64::max) < 1e-4, "{format}");
            }
            for tokens in 1..MOST {
                for (few, all) in of_first(tokens).iter().zip(&all) {
                    assert_eq!(few, &all[..tokens * ROWS], "{format}, {tokens} tokens");
                }
            }
        }
        Ok(())
    }
}
