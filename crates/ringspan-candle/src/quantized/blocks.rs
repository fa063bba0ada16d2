//! The blocks of each format, and how their numbers are decoded.
//!
//! Arithmetic is that of ggml's reference, in f32 and in its order, so decoded numbers are equal to the bit.

mod codes;
mod k_quants;
mod plain;

pub(super) use codes::{BlockCodes, BlockTarget};
pub(super) use k_quants::{Q4K, Q5K, Q6K};
pub(super) use plain::{BF16, F16};

use super::input::Input;
use super::lanes::{Lanes, f16_to_f32};
use bytemuck::{AnyBitPattern, Pod, Zeroable};
use ringspan::kernel::{prefetch, prefetch_at};
use std::iter::Zip;
use std::slice;

/// A block of LEN numbers. Consecutive blocks form a part of a row; their fields are bytes, so blocks may lie at any address.
pub(super) trait Block<const LEN: usize>: AnyBitPattern {
    /// Blocks that are decoded in parts.
    type Parts<'a>: DecodeParts;
    /// The numbers in a part.
    const PART: usize;

    /// Decodes blocks and writes their numbers: LEN for each.
    fn decode<L: Lanes>(l: L, blocks: &[Self], to: &mut [f32]);

    /// Blocks that will be decoded part by part; those that `following` begins with are prefetched meanwhile. Numbers that are fewer than a
    /// part are decoded at once, and followed by zeros up to a multiple of 16.
    fn parts<'a, L: Lanes>(l: L, blocks: &'a [Self], following: &'a [Self], to: &'a mut [f32]) -> Self::Parts<'a>;

    /// Whether a row may be multiplied by several calls of [`add_dots`](Self::add_dots), each for some of its blocks.
    const CAN_SPLIT_ROWS: bool;

    /// The largest number of tokens whose products are faster with [`add_dots`](Self::add_dots) than in the L1 cache.
    fn tokens_in_registers<L: Lanes>() -> usize;

    /// Brings the factors of whole blocks, of one or several tokens, into the order in which [`add_dots`](Self::add_dots) reads them.
    fn arranged<L: Lanes>(l: L, x: Input) -> ArrangedActivations;

    /// For each of T tokens, adds the products of the blocks' numbers and the token's factors, which begin at block `first`, to `sums[t]`,
    /// a vector whose lanes are summed later. A token's sum does not depend on T. Prefetches `next`, which has as many blocks.
    fn add_dots<L: Lanes, const T: usize>(
        l: L,
        blocks: &[Self],
        next: &[Self],
        first: usize,
        x: &ArrangedActivations,
        sums: &mut [L::F; T],
    );
}

/// Blocks that are decoded in parts.
pub(super) trait DecodeParts {
    /// Decodes the next part, and returns whether there was one.
    fn decode_next<L: Lanes>(&mut self, l: L) -> bool;
}

/// The activations of some tokens, in the order in which [`Block::add_dots`] reads them.
pub(super) struct ArrangedActivations {
    /// `[width / 32][tokens][32]`: groups of 32 factors, in an order that depends on format and instruction set; zeros fill the last one.
    x: Vec<CacheLine>,
    /// `[block][token]`: for formats with minima, the sums of each 32 factors of the block, followed by zeros; empty for other formats.
    sums: Vec<[f32; 16]>,
    pub(super) tokens: usize,
}

/// Vectors across two cache lines would take twice as long to load.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct CacheLine(pub(super) [f32; 16]);

impl ArrangedActivations {
    /// Factors in their order.
    fn in_order(x: Input) -> Self {
        let mut lines = vec![CacheLine::zeroed(); 2 * x.tokens * x.width.div_ceil(32)];
        let to = bytemuck::cast_slice_mut::<_, [f32; 32]>(&mut lines);
        for t in 0..x.tokens {
            for (i, run) in x.row(t).chunks(32).enumerate() {
                to[i * x.tokens + t][..run.len()].copy_from_slice(run);
            }
        }
        Self { x: lines, sums: Vec::new(), tokens: x.tokens }
    }

    /// The factors of each block of LEN numbers, of T tokens: in their memory, the first 32 of each token, then the next 32 of each.
    #[inline(always)]
    fn factors<const LEN: usize, const T: usize>(&self) -> &[[[f32; LEN]; T]] {
        bytemuck::cast_slice::<_, f32>(&self.x).as_chunks().0.as_chunks().0
    }
}

/// A block of LEN numbers, at least 32.
pub(super) trait BlockNumbers<const LEN: usize>: AnyBitPattern {
    /// Whether each 32 numbers have a minimum.
    const HAS_MINIMA: bool = false;
    /// The number of parts, of equally many numbers, that can be visited one after the other.
    const PARTS: usize = 1;
    /// The scales and minima of all parts.
    type Scales: Copy + Zeroable;

    fn scales<L: Lanes>(&self, l: L) -> Self::Scales;

    /// Passes the codes of a part and their scales to `visitor`, 32 at a time.
    fn visit_part<L: Lanes>(&self, l: L, part: usize, scales: &Self::Scales, visitor: &mut impl Visitor<L>);

    /// Passes all minima to `visitor`.
    #[inline(always)]
    fn visit_minima<L: Lanes>(_: L, _: &Self::Scales, _: &mut impl Visitor<L>) {}

    /// Passes all minima, codes and scales to `visitor`.
    #[inline(always)]
    fn visit<L: Lanes>(&self, l: L, visitor: &mut impl Visitor<L>) {
        let scales = self.scales(l);
        Self::visit_minima(l, &scales, visitor);
        for part in 0..Self::PARTS {
            self.visit_part(l, part, &scales, visitor);
        }
    }
}

/// Receives the codes of a block as they are unpacked.
pub(super) trait Visitor<L: Lanes> {
    /// Receives numbers 32 i to 32 i + 31: codes times a scale.
    fn take(&mut self, l: L, i: usize, scale: f32, codes: L::Codes);

    /// Receives numbers 32 i to 32 i + 31: codes times a scale for the first 16, and one for the others.
    fn take_halves(&mut self, l: L, i: usize, scales: [f32; 2], codes: L::Codes);

    /// Receives numbers 32 i to 32 i + 31: codes times a scale, less a minimum.
    fn take_above(&mut self, l: L, i: usize, scale: f32, minimum: f32, codes: L::Codes);

    /// Receives all the minima of the block, and zeros behind them.
    fn minima(&mut self, _: L, _: &[f32; 16]) {}
}

impl<B: BlockNumbers<LEN>, const LEN: usize> Block<LEN> for B {
    const CAN_SPLIT_ROWS: bool = true;
    type Parts<'a> = BlockParts<'a, B, LEN>;
    const PART: usize = LEN / B::PARTS;

    #[inline(always)]
    fn parts<'a, L: Lanes>(
        _: L,
        blocks: &'a [Self],
        following: &'a [Self],
        to: &'a mut [f32],
    ) -> BlockParts<'a, B, LEN> {
        BlockParts {
            blocks: blocks.iter().zip(to.as_chunks_mut().0),
            following: following.as_ptr(),
            part: 0,
            current: None,
        }
    }

    fn tokens_in_registers<L: Lanes>() -> usize {
        L::TOKENS_IN_REGISTERS
    }

    #[inline(always)]
    fn decode<L: Lanes>(l: L, blocks: &[Self], to: &mut [f32]) {
        debug_assert_eq!(blocks.len() * LEN, to.len());
        for (block, to) in blocks.iter().zip(to.as_chunks_mut::<LEN>().0) {
            block.visit(l, &mut Store { to: to.as_chunks_mut().0 });
        }
    }

    #[inline(always)]
    fn arranged<L: Lanes>(l: L, x: Input) -> ArrangedActivations {
        let mut arranged = ArrangedActivations::in_order(x);
        if Self::HAS_MINIMA {
            arranged.sums = vec![[0.0; 16]; arranged.x.len() / (LEN / 16)];
            for t in 0..x.tokens {
                for (block, row) in x.row(t).as_chunks::<LEN>().0.iter().enumerate() {
                    for (sum, row) in arranged.sums[block * x.tokens + t].iter_mut().zip(row.as_chunks::<32>().0) {
                        *sum = row.iter().sum();
                    }
                }
            }
        }
        for x in bytemuck::cast_slice_mut(&mut arranged.x) {
            l.arrange(x);
        }
        arranged
    }

    #[inline(always)]
    fn add_dots<L: Lanes, const T: usize>(
        l: L,
        blocks: &[Self],
        next: &[Self],
        first: usize,
        x: &ArrangedActivations,
        sums: &mut [L::F; T],
    ) {
        let factors = &x.factors::<LEN, T>()[first..first + blocks.len()];
        let sums_of_x = if Self::HAS_MINIMA { &x.sums.as_chunks().0[first..first + blocks.len()] } else { &[] };
        let mut sum = Sum { x: &[], sums_of_x: &[[0.0; 16]; T], sums: *sums };
        for (i, ((block, next), factors)) in blocks.iter().zip(next).zip(factors).enumerate() {
            prefetch(slice::from_ref(next));
            sum.x = factors.as_flattened().as_chunks().0;
            if Self::HAS_MINIMA {
                sum.sums_of_x = &sums_of_x[i];
            }
            block.visit(l, &mut sum);
        }
        *sums = sum.sums;
    }
}

/// Blocks of at least 32 numbers that are decoded in parts.
pub(super) struct BlockParts<'a, B: BlockNumbers<LEN>, const LEN: usize> {
    blocks: Zip<slice::Iter<'a, B>, slice::IterMut<'a, [f32; LEN]>>,
    /// The block that is prefetched with the next one.
    following: *const B,
    part: usize,
    /// The block of which parts are left.
    current: Option<(&'a B, &'a mut [f32; LEN], B::Scales)>,
}

impl<B: BlockNumbers<LEN>, const LEN: usize> DecodeParts for BlockParts<'_, B, LEN> {
    #[inline(always)]
    fn decode_next<L: Lanes>(&mut self, l: L) -> bool {
        if self.part == 0 {
            let Some((block, to)) = self.blocks.next() else { return false };
            self.current = Some((block, to, block.scales(l)));
            prefetch_at(self.following);
            self.following = self.following.wrapping_add(1);
        }
        if let Some((block, to, scales)) = &mut self.current {
            block.visit_part(l, self.part, scales, &mut Store { to: to.as_chunks_mut().0 });
        }
        self.part = (self.part + 1) % B::PARTS;
        true
    }
}

/// A visitor that writes the numbers.
struct Store<'a> {
    to: &'a mut [[f32; 32]],
}

impl Store<'_> {
    #[inline(always)]
    fn store<L: Lanes>(&mut self, l: L, i: usize, numbers: [L::F; 2]) {
        for (to, numbers) in self.to[i].as_chunks_mut().0.iter_mut().zip(numbers) {
            l.store(numbers, to);
        }
    }
}

impl<L: Lanes> Visitor<L> for Store<'_> {
    #[inline(always)]
    fn take(&mut self, l: L, i: usize, scale: f32, codes: L::Codes) {
        self.take_halves(l, i, [scale; 2], codes);
    }

    #[inline(always)]
    fn take_halves(&mut self, l: L, i: usize, scales: [f32; 2], codes: L::Codes) {
        let [first, last] = l.numbers(codes);
        self.store(l, i, [l.mul(l.splat(scales[0]), first), l.mul(l.splat(scales[1]), last)]);
    }

    #[inline(always)]
    fn take_above(&mut self, l: L, i: usize, scale: f32, minimum: f32, codes: L::Codes) {
        let ([first, last], scale, minimum) = (l.numbers(codes), l.splat(scale), l.splat(minimum));
        self.store(l, i, [l.sub(l.mul(scale, first), minimum), l.sub(l.mul(scale, last), minimum)]);
    }
}

/// A visitor that multiplies the numbers with the arranged factors of T tokens and sums the products.
struct Sum<'a, F, const T: usize> {
    /// 32 factors of each token, then the next 32 of each.
    x: &'a [[f32; 32]],
    /// The sums of each 32 factors of each token.
    sums_of_x: &'a [[f32; 16]; T],
    sums: [F; T],
}

impl<'a, F, const T: usize> Sum<'a, F, T> {
    /// The factors of numbers 32 i to 32 i + 31.
    #[inline(always)]
    fn factors(&self, i: usize) -> &'a [[f32; 32]; T] {
        &self.x.as_chunks().0[i]
    }
}

impl<L: Lanes, const T: usize> Visitor<L> for Sum<'_, L::F, T> {
    #[inline(always)]
    fn take(&mut self, l: L, i: usize, scale: f32, codes: L::Codes) {
        let factors = self.factors(i);
        l.add_scaled(&mut self.sums, scale, codes, factors);
    }

    #[inline(always)]
    fn take_halves(&mut self, l: L, i: usize, scales: [f32; 2], codes: L::Codes) {
        let factors = self.factors(i);
        l.add_scaled_halves(&mut self.sums, scales, codes, factors);
    }

    #[inline(always)]
    fn take_above(&mut self, l: L, i: usize, scale: f32, _: f32, codes: L::Codes) {
        self.take(l, i, scale, codes);
    }

    /// A minimum is multiplied with the sum of its factors, which takes fewer operations than subtracting it from each number.
    #[inline(always)]
    fn minima(&mut self, l: L, minima: &[f32; 16]) {
        l.subtract_minima(&mut self.sums, minima, self.sums_of_x);
    }
}

/// Calls a function that is generic in the block type of a format and in the block's count of numbers.
macro_rules! with_block {
    ($format:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        use $crate::quantized::{Format, blocks};
        match $format {
            Format::F16 => $function::<blocks::F16, 1>($($argument),*),
            Format::BF16 => $function::<blocks::BF16, 1>($($argument),*),
            Format::Q4_0 => $function::<blocks::Q4_0, 32>($($argument),*),
            Format::Q5_0 => $function::<blocks::Q5_0, 32>($($argument),*),
            Format::Q8_0 => $function::<blocks::Q8_0, 32>($($argument),*),
            Format::Q4K => $function::<blocks::Q4K, 256>($($argument),*),
            Format::Q5K => $function::<blocks::Q5K, 256>($($argument),*),
            Format::Q6K => $function::<blocks::Q6K, 256>($($argument),*),
            Format::Iq4Nl => $function::<blocks::Iq4Nl, 32>($($argument),*),
            Format::Mxfp4 => $function::<blocks::Mxfp4, 32>($($argument),*),
        }
    }};
}
pub(super) use with_block;

#[repr(C)]
#[derive(Clone, Copy, AnyBitPattern)]
pub(super) struct Q4_0 {
    scale: [u8; 2],
    /// The first 16 numbers are in the low halves of the bytes, the last 16 in the high halves.
    codes: [u8; 16],
}

/// The codes of [`Q4_0`] less eight.
const LESS_EIGHT: [i8; 16] = [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7];

impl BlockNumbers<32> for Q4_0 {
    type Scales = f32;

    #[inline(always)]
    fn scales<L: Lanes>(&self, _: L) -> f32 {
        f16_to_f32(self.scale)
    }

    #[inline(always)]
    fn visit_part<L: Lanes>(&self, l: L, _: usize, scale: &f32, visitor: &mut impl Visitor<L>) {
        visitor.take(l, 0, *scale, l.chosen(&LESS_EIGHT, &self.codes));
    }
}

#[repr(C)]
#[derive(Clone, Copy, AnyBitPattern)]
pub(super) struct Q5_0 {
    scale: [u8; 2],
    /// The fifth bit of each number.
    high: [u8; 4],
    /// The low four bits of each number, laid out as in [`Q4_0`].
    codes: [u8; 16],
}

impl BlockNumbers<32> for Q5_0 {
    type Scales = f32;

    #[inline(always)]
    fn scales<L: Lanes>(&self, _: L) -> f32 {
        f16_to_f32(self.scale)
    }

    #[inline(always)]
    fn visit_part<L: Lanes>(&self, l: L, _: usize, scale: &f32, visitor: &mut impl Visitor<L>) {
        visitor.take(l, 0, *scale, l.five_bit_codes(&self.codes, self.high));
    }
}

#[repr(C)]
#[derive(Clone, Copy, AnyBitPattern)]
pub(super) struct Q8_0 {
    scale: [u8; 2],
    codes: [u8; 32],
}

impl BlockNumbers<32> for Q8_0 {
    type Scales = f32;

    #[inline(always)]
    fn scales<L: Lanes>(&self, _: L) -> f32 {
        f16_to_f32(self.scale)
    }

    #[inline(always)]
    fn visit_part<L: Lanes>(&self, l: L, _: usize, scale: &f32, visitor: &mut impl Visitor<L>) {
        visitor.take(l, 0, *scale, l.byte_codes(&self.codes));
    }
}

/// The uneven steps that the codes of [`Iq4Nl`] select.
const UNEVEN: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

#[repr(C)]
#[derive(Clone, Copy, AnyBitPattern)]
pub(super) struct Iq4Nl {
    scale: [u8; 2],
    /// The codes of the numbers, laid out as in [`Q4_0`].
    codes: [u8; 16],
}

impl BlockNumbers<32> for Iq4Nl {
    type Scales = f32;

    #[inline(always)]
    fn scales<L: Lanes>(&self, _: L) -> f32 {
        f16_to_f32(self.scale)
    }

    #[inline(always)]
    fn visit_part<L: Lanes>(&self, l: L, _: usize, scale: &f32, visitor: &mut impl Visitor<L>) {
        visitor.take(l, 0, *scale, l.chosen(&UNEVEN, &self.codes));
    }
}

/// The numbers of FP4 times two, which are integers. As in ggml, negative zero is zero.
const TWICE_FP4: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

#[repr(C)]
#[derive(Clone, Copy, AnyBitPattern)]
pub(super) struct Mxfp4 {
    /// The exponent of a power of two, plus 127.
    exponent: u8,
    /// The codes of the numbers, laid out as in [`Q4_0`].
    codes: [u8; 16],
}

impl Mxfp4 {
    /// Half of 2^(exponent - 127), since the table is doubled; for the two smallest exponents it is subnormal.
    #[inline(always)]
    fn scale(&self) -> f32 {
        f32::from_bits(match self.exponent {
            least @ 0..2 => 0x0020_0000 << least,
            exponent => u32::from(exponent - 1) << 23,
        })
    }
}

impl BlockNumbers<32> for Mxfp4 {
    type Scales = f32;

    #[inline(always)]
    fn scales<L: Lanes>(&self, _: L) -> f32 {
        self.scale()
    }

    #[inline(always)]
    fn visit_part<L: Lanes>(&self, l: L, _: usize, scale: &f32, visitor: &mut impl Visitor<L>) {
        visitor.take(l, 0, *scale, l.chosen(&TWICE_FP4, &self.codes));
    }
}
