//! Products of a few tokens with the decoded columns of four rows, while other rows are decoded.

use super::MAX_COLUMNS;
use crate::quantized::blocks::{Block, CacheLine, DecodeParts};
use crate::quantized::dots::ROWS;
use crate::quantized::lanes::Lanes;
use ringspan::kernel::prefetch;

/// The most tokens of a tile.
pub(super) const MAX_TOKENS: usize = 4;

/// Whether tiles of so many tokens leave registers to decode other rows. Only the largest do, so that decoding is not compiled for each
/// size of tile.
pub(super) const fn decodes<L: Lanes>(tokens: usize) -> bool {
    L::REGISTERS >= 32 && tokens == MAX_TOKENS
}

/// The number of tokens of the next tile if there are `tokens` left.
#[inline(always)]
pub(super) fn next_tokens<L: Lanes>(tokens: usize) -> usize {
    match tokens {
        // Four are taken as two and two: the sums of one token alone would wait for each other.
        4 if L::REGISTERS < 32 => 2,
        4.. if L::REGISTERS >= 32 => MAX_TOKENS,
        3.. => 3,
        tokens => tokens,
    }
}

/// The vectors of one row or token in a piece. Its size is fixed, so that the addresses of several rows take one register.
pub(super) type Columns = [CacheLine; MAX_COLUMNS / 16];

/// The factors of some products.
pub(super) struct Tile<'a> {
    pub(super) x: &'a [Columns],
    pub(super) decoded: &'a [Columns; ROWS],
    /// How many vectors of each are multiplied.
    pub(super) vectors: usize,
}

impl Tile<'_> {
    /// Adds the products of the first T tokens to their sums, and decodes or prefetches `rows` meanwhile.
    #[inline(always)]
    pub(super) fn add_products<L: Lanes, B: Block<LEN>, const LEN: usize, const T: usize>(
        self,
        l: L,
        sums: &mut Sums<L::F>,
        rows: NextRows<B>,
    ) {
        let Self { x, decoded, vectors } = self;
        let x: &[Columns; T] = x.first_chunk().expect("a tile has T tokens");
        let mut tile: [[L::F; ROWS]; T] = sums.begin(l);
        if const { decodes::<L>(T) } && !rows.blocks.is_empty() {
            let (count, per_part) = (rows.blocks.len(), B::PART / 16);
            let parts = vectors / per_part;
            let mut part = 0;
            for (r, to) in rows.to.iter_mut().enumerate() {
                let mut row = B::parts(l, rows.blocks[r], rows.following[r], bytemuck::cast_slice_mut(to));
                // Each row has an equal share of the vectors. With each part of its share, `count` parts of the row are decoded, so that both
                // end together.
                let end = parts * (r + 1) / count;
                while part < end {
                    for _ in 0..count {
                        row.decode_next(l);
                    }
                    for i in part * per_part..(part + 1) * per_part {
                        multiply(l, x, decoded, i, &mut tile);
                    }
                    part += 1;
                }
                while row.decode_next(l) {}
            }
            for i in parts * per_part..vectors {
                multiply(l, x, decoded, i, &mut tile);
            }
        } else {
            // Each tile prefetches some of the rows: if all were prefetched at once, decoding would wait for them.
            for blocks in rows.blocks {
                prefetch(blocks);
            }
            let x: [&[[f32; 16]]; T] = std::array::from_fn(|t| bytemuck::cast_slice(&x[t][..vectors]));
            let decoded: [&[[f32; 16]]; ROWS] = std::array::from_fn(|r| bytemuck::cast_slice(&decoded[r][..vectors]));
            l.add_products(x, decoded, &mut tile);
        }
        sums.end(l, tile);
    }
}

/// Adds the products of one vector of each token and each row.
#[inline(always)]
fn multiply<L: Lanes, const T: usize>(
    l: L,
    x: &[Columns; T],
    decoded: &[Columns; ROWS],
    i: usize,
    sums: &mut [[L::F; ROWS]; T],
) {
    // Loops over indices, which the compiler unrolls so that the sums stay in registers; it did not with iterators.
    let mut factors = [l.splat(0.0); ROWS];
    for r in 0..ROWS {
        factors[r] = l.load(&decoded[r][i].0);
    }
    for t in 0..T {
        let x = l.load(&x[t][i].0);
        for r in 0..ROWS {
            sums[t][r] = l.mul_add(factors[r], x, sums[t][r]);
        }
    }
}

/// Rows of the next piece, which a tile decodes or, without registers left for that, prefetches.
pub(super) struct NextRows<'a, B> {
    pub(super) to: &'a mut [Columns],
    pub(super) blocks: &'a [&'a [B]],
    /// The rows of the piece after that in the same places. They are prefetched where these are decoded.
    pub(super) following: &'a [&'a [B]],
}

/// Decodes all columns of the rows of a piece.
#[inline(always)]
pub(super) fn decode<L: Lanes, B: Block<LEN>, const LEN: usize>(l: L, rows: &[&[B]; ROWS], to: &mut [Columns; ROWS]) {
    for (blocks, to) in rows.iter().zip(to) {
        let (numbers, rest) = bytemuck::cast_slice_mut::<_, f32>(to).split_at_mut(blocks.len() * LEN);
        B::decode(l, blocks, numbers);
        // The last vector is multiplied as a whole, so its rest is filled with zeros.
        rest[..numbers.len().next_multiple_of(16) - numbers.len()].fill(0.0);
    }
}

/// Where the sums of products come from and go to: those of the first piece of a row begin with zeros, and those of the last one are
/// complete.
pub(super) struct Sums<'a, 'b, F> {
    pub(super) so_far: &'a mut [[F; ROWS]],
    pub(super) is_first: bool,
    pub(super) is_last: bool,
    pub(super) out: &'a mut [&'b mut [f32]],
    pub(super) first_row: usize,
}

impl<F: Copy> Sums<'_, '_, F> {
    #[inline(always)]
    fn begin<L: Lanes<F = F>, const T: usize>(&self, l: L) -> [[F; ROWS]; T] {
        let mut sums = [[l.splat(0.0); ROWS]; T];
        if !self.is_first {
            for (sums, so_far) in sums.iter_mut().zip(self.so_far.iter()) {
                *sums = *so_far;
            }
        }
        sums
    }

    #[inline(always)]
    fn end<L: Lanes<F = F>, const T: usize>(&mut self, l: L, sums: [[F; ROWS]; T]) {
        if !self.is_last {
            for (so_far, sums) in self.so_far.iter_mut().zip(&sums) {
                *so_far = *sums;
            }
            return;
        }
        for (out, sums) in self.out.iter_mut().zip(l.sums_of_tokens(sums)) {
            let out = &mut out[self.first_row..];
            match out.first_chunk_mut::<ROWS>() {
                // All four are added by one instruction.
                Some(out) => {
                    for r in 0..ROWS {
                        out[r] += sums[r];
                    }
                }
                None => out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum),
            }
        }
    }
}
