//! The blocks of each format, and how their numbers are decoded.
//!
//! Arithmetic is that of ggml's reference, in f32 and in its order, so decoded numbers are equal to the bit.

mod codes;
mod k_quants;

pub(super) use codes::{BlockCodes, BlockTarget};
pub(super) use k_quants::{Q4K, Q5K, Q6K};

use super::lanes::{Lanes, f16_to_f32};
use bytemuck::{AnyBitPattern, Pod, Zeroable};

/// A block of LEN numbers. Consecutive blocks form a part of a row; their fields are bytes, so blocks may lie at any address.
pub(super) trait Block<const LEN: usize>: AnyBitPattern {
    /// Decodes blocks and writes their numbers: LEN for each.
    fn decode<L: Lanes>(l: L, blocks: &[Self], to: &mut [f32]);

    /// Multiplies the numbers of blocks with as many of x, and sums the products in each lane; the lanes are not summed.
    fn dot<L: Lanes>(l: L, blocks: &[Self], x: &[f32]) -> L::F;
}

/// A block of LEN numbers, at least 16.
trait BlockNumbers<const LEN: usize>: AnyBitPattern {
    /// Decodes the numbers of the block, and passes them to `visitor`, 16 at a time.
    fn visit<L: Lanes>(&self, l: L, visitor: &mut impl Visitor<L>);
}

/// Receives the numbers of a block as they are decoded.
trait Visitor<L: Lanes> {
    /// Receives numbers 16 i to 16 i + 15.
    fn take(&mut self, l: L, i: usize, numbers: L::F);

    /// Receives the numbers of a block of 32 as codes and their common scale.
    fn take_scaled(&mut self, l: L, scale: L::F, codes: [L::F; 2]);
}

impl<B: BlockNumbers<LEN>, const LEN: usize> Block<LEN> for B {
    #[inline(always)]
    fn decode<L: Lanes>(l: L, blocks: &[Self], to: &mut [f32]) {
        debug_assert_eq!(blocks.len() * LEN, to.len());
        for (block, to) in blocks.iter().zip(to.as_chunks_mut::<LEN>().0) {
            block.visit(l, &mut Store { to: to.as_chunks_mut().0 });
        }
    }

    #[inline(always)]
    fn dot<L: Lanes>(l: L, blocks: &[Self], x: &[f32]) -> L::F {
        debug_assert_eq!(blocks.len() * LEN, x.len());
        let mut sums = [l.splat(0.0); CHAINS];
        for (block, x) in blocks.iter().zip(x.as_chunks::<LEN>().0) {
            block.visit(l, &mut Sum { x: x.as_chunks().0, sums: &mut sums });
        }
        total(l, sums)
    }
}

/// A visitor that writes the numbers.
struct Store<'a> {
    to: &'a mut [[f32; 16]],
}

impl<L: Lanes> Visitor<L> for Store<'_> {
    #[inline(always)]
    fn take(&mut self, l: L, i: usize, numbers: L::F) {
        l.store(numbers, &mut self.to[i]);
    }

    #[inline(always)]
    fn take_scaled(&mut self, l: L, scale: L::F, [first, second]: [L::F; 2]) {
        l.store(l.mul(scale, first), &mut self.to[0]);
        l.store(l.mul(scale, second), &mut self.to[1]);
    }
}

/// Number of independent sums, so that additions do not wait for each other.
const CHAINS: usize = 2;

/// A visitor that multiplies the numbers with x and sums the products.
struct Sum<'a, F> {
    x: &'a [[f32; 16]],
    sums: &'a mut [F; CHAINS],
}

impl<L: Lanes> Visitor<L> for Sum<'_, L::F> {
    #[inline(always)]
    fn take(&mut self, l: L, i: usize, numbers: L::F) {
        let sum = &mut self.sums[i % CHAINS];
        *sum = l.mul_add(numbers, l.load(&self.x[i]), *sum);
    }

    /// The scale is multiplied with the sum of the block, which takes fewer operations than multiplying it with each code.
    #[inline(always)]
    fn take_scaled(&mut self, l: L, scale: L::F, [first, second]: [L::F; 2]) {
        let of_block = l.mul_add(second, l.load(&self.x[1]), l.mul(first, l.load(&self.x[0])));
        self.sums[0] = l.mul_add(scale, of_block, self.sums[0]);
    }
}

#[inline(always)]
fn total<L: Lanes>(l: L, [a, b]: [L::F; CHAINS]) -> L::F {
    l.add(a, b)
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

/// Defines a format whose blocks are one number: as many as there are lanes are decoded together.
macro_rules! plain {
    ($name:ident, $widen:ident) => {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        pub(super) struct $name([u8; 2]);

        impl Block<1> for $name {
            #[inline(always)]
            fn decode<L: Lanes>(l: L, blocks: &[Self], to: &mut [f32]) {
                debug_assert_eq!(blocks.len(), to.len());
                let ((blocks, rest), (to, rest_to)) = (blocks.as_chunks::<16>(), to.as_chunks_mut::<16>());
                for (blocks, to) in blocks.iter().zip(to) {
                    l.store(l.$widen(bytemuck::cast(*blocks)), to);
                }
                if !rest.is_empty() {
                    let mut last = [0.0; 16];
                    l.store(l.$widen(bytemuck::cast(padded(rest))), &mut last);
                    rest_to.copy_from_slice(&last[..rest.len()]);
                }
            }

            #[inline(always)]
            fn dot<L: Lanes>(l: L, blocks: &[Self], x: &[f32]) -> L::F {
                debug_assert_eq!(blocks.len(), x.len());
                let ((blocks, rest), (x, rest_x)) = (blocks.as_chunks::<16>(), x.as_chunks::<16>());
                let mut sums = [l.splat(0.0); CHAINS];
                for (i, (blocks, x)) in blocks.iter().zip(x).enumerate() {
                    let sum = &mut sums[i % CHAINS];
                    *sum = l.mul_add(l.$widen(bytemuck::cast(*blocks)), l.load(x), *sum);
                }
                if !rest.is_empty() {
                    let last = l.$widen(bytemuck::cast(padded(rest)));
                    sums[0] = l.mul_add(last, l.load(&padded(rest_x)), sums[0]);
                }
                total(l, sums)
            }
        }
    };
}

/// Pads fewer than 16 elements with zeros.
#[inline(always)]
pub(super) fn padded<T: Zeroable + Copy>(rest: &[T]) -> [T; 16] {
    let mut padded = [T::zeroed(); 16];
    padded[..rest.len()].copy_from_slice(rest);
    padded
}

plain!(F16, widen_half);
plain!(BF16, widen_bf16);

/// Repeats the scale of 32 numbers 16 times. Integer operations convert it, since the vector units are busy with the numbers' codes.
#[inline(always)]
fn scale<L: Lanes>(l: L, half: [u8; 2]) -> L::F {
    l.splat(f16_to_f32(half))
}

#[repr(C)]
#[derive(Clone, Copy, AnyBitPattern)]
pub(super) struct Q4_0 {
    scale: [u8; 2],
    /// The first 16 numbers are in the low halves of the bytes, the last 16 in the high halves.
    codes: [u8; 16],
}

impl BlockNumbers<32> for Q4_0 {
    #[inline(always)]
    fn visit<L: Lanes>(&self, l: L, visitor: &mut impl Visitor<L>) {
        let (scale, eight) = (scale(l, self.scale), l.splat_bytes(8));
        let code = |codes| l.widen(l.sub_bytes(codes, eight));
        visitor.take_scaled(l, scale, l.nibbles(l.bytes(self.codes), code, code));
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
    #[inline(always)]
    fn visit<L: Lanes>(&self, l: L, visitor: &mut impl Visitor<L>) {
        visitor.take_scaled(l, scale(l, self.scale), l.five_bits(l.bytes(self.codes), self.high));
    }
}

#[repr(C)]
#[derive(Clone, Copy, AnyBitPattern)]
pub(super) struct Q8_0 {
    scale: [u8; 2],
    codes: [[u8; 16]; 2],
}

impl BlockNumbers<32> for Q8_0 {
    #[inline(always)]
    fn visit<L: Lanes>(&self, l: L, visitor: &mut impl Visitor<L>) {
        let codes = [l.widen(l.bytes(self.codes[0])), l.widen(l.bytes(self.codes[1]))];
        visitor.take_scaled(l, scale(l, self.scale), codes);
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
    #[inline(always)]
    fn visit<L: Lanes>(&self, l: L, visitor: &mut impl Visitor<L>) {
        chosen(l, scale(l, self.scale), UNEVEN, self.codes, visitor);
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
    #[inline(always)]
    fn visit<L: Lanes>(&self, l: L, visitor: &mut impl Visitor<L>) {
        chosen(l, l.splat(self.scale()), TWICE_FP4, self.codes, visitor);
    }
}

/// Passes the scale times the table entries that the halves of bytes select to `visitor`.
#[inline(always)]
fn chosen<L: Lanes>(l: L, scale: L::F, table: [i8; 16], codes: [u8; 16], visitor: &mut impl Visitor<L>) {
    let table = l.bytes(bytemuck::cast(table));
    let code = |codes| l.widen(l.choose(table, codes));
    visitor.take_scaled(l, scale, l.nibbles(l.bytes(codes), code, code));
}
