//! ggml's K-quants: blocks of 256 numbers in sub-blocks, whose scales (and minima) are quantized, too.

use super::{BlockCodes, BlockNumbers, BlockTarget, Visitor};
use crate::quantized::lanes::Lanes;
use bytemuck::AnyBitPattern;
use ringspan::kernel::int16::Scales;

#[repr(C)]
#[derive(Clone, Copy, AnyBitPattern)]
pub(in crate::quantized) struct Q4K {
    scale: [u8; 2],
    minimum: [u8; 2],
    /// Scales and minima of eight sub-blocks of 32 numbers, packed as [`scales_and_minima`] describes.
    parts: [u8; 12],
    /// Each group of 32 bytes holds a sub-block in its low halves, and the next sub-block in its high halves.
    codes: [[[u8; 16]; 2]; 4],
}

impl BlockNumbers<256> for Q4K {
    #[inline(always)]
    fn visit<L: Lanes>(&self, l: L, visitor: &mut impl Visitor<L>) {
        let parts = scales_and_minima(l, self.scale, self.minimum, &self.parts);
        for (i, [first, second]) in self.codes.iter().enumerate() {
            let (of_low, of_high) = (parts.above(l, 2 * i), parts.above(l, 2 * i + 1));
            let [low, high] = l.nibbles(l.bytes(*first), &of_low, &of_high);
            visitor.take(l, 4 * i, low);
            visitor.take(l, 4 * i + 2, high);
            let [low, high] = l.nibbles(l.bytes(*second), &of_low, &of_high);
            visitor.take(l, 4 * i + 1, low);
            visitor.take(l, 4 * i + 3, high);
        }
    }
}

impl BlockCodes<256> for Q4K {
    const SCALES: Scales = Scales::Of32WithMinima;

    #[inline(always)]
    fn codes<L: Lanes>(&self, l: L, mut to: BlockTarget) {
        scales_and_minima(l, self.scale, self.minimum, &self.parts).write(&mut to);
        for (i, codes) in self.codes.iter().enumerate() {
            for side in 0..2 {
                let codes = l.bytes(codes[side]);
                to.set(l, 4 * i + side, l.low(codes));
                to.set(l, 4 * i + 2 + side, l.high(codes));
            }
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, AnyBitPattern)]
pub(in crate::quantized) struct Q5K {
    scale: [u8; 2],
    minimum: [u8; 2],
    /// Scales and minima of eight sub-blocks, as in [`Q4K`].
    parts: [u8; 12],
    /// Bit i of byte j is the fifth bit of number j of sub-block i.
    high: [[u8; 16]; 2],
    /// The low four bits of each number, laid out as in [`Q4K`].
    codes: [[[u8; 16]; 2]; 4],
}

impl BlockNumbers<256> for Q5K {
    #[inline(always)]
    fn visit<L: Lanes>(&self, l: L, visitor: &mut impl Visitor<L>) {
        let parts = scales_and_minima(l, self.scale, self.minimum, &self.parts);
        let one = l.splat_bytes(1);
        for (i, codes) in self.codes.iter().enumerate() {
            let (of_low, of_high) = (parts.above(l, 2 * i), parts.above(l, 2 * i + 1));
            for side in 0..2 {
                let (codes, bits) = (l.bytes(codes[side]), l.shift_right(l.bytes(self.high[side]), 2 * i as u32));
                let fifth = l.shift_left(l.and(bits, one), 4);
                visitor.take(l, 4 * i + side, of_low(l.or(l.low(codes), fifth)));
                let fifth = l.shift_left(l.and(l.shift_right(bits, 1), one), 4);
                visitor.take(l, 4 * i + 2 + side, of_high(l.or(l.high(codes), fifth)));
            }
        }
    }
}

impl BlockCodes<256> for Q5K {
    const SCALES: Scales = Scales::Of32WithMinima;

    #[inline(always)]
    fn codes<L: Lanes>(&self, l: L, mut to: BlockTarget) {
        scales_and_minima(l, self.scale, self.minimum, &self.parts).write(&mut to);
        let one = l.splat_bytes(1);
        for (i, codes) in self.codes.iter().enumerate() {
            for side in 0..2 {
                let (codes, bits) = (l.bytes(codes[side]), l.shift_right(l.bytes(self.high[side]), 2 * i as u32));
                to.set(l, 4 * i + side, l.or(l.low(codes), l.shift_left(l.and(bits, one), 4)));
                let fifth = l.shift_left(l.and(l.shift_right(bits, 1), one), 4);
                to.set(l, 4 * i + 2 + side, l.or(l.high(codes), fifth));
            }
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, AnyBitPattern)]
pub(in crate::quantized) struct Q6K {
    /// The low four bits: 64 bytes for each half of the block, whose low halves are sub-blocks 0 and 1 of 32 numbers, and
    /// whose high halves are sub-blocks 2 and 3.
    low: [[[[u8; 16]; 2]; 2]; 2],
    /// The high two bits: 32 bytes for each half of the block, with those of sub-block i in bits 2 i and 2 i + 1.
    high: [[[u8; 16]; 2]; 2],
    /// A scale for each 16 numbers.
    scales: [i8; 16],
    scale: [u8; 2],
}

impl Q6K {
    /// Passes codes 16 i to 16 i + 15 of the block to `visit`, for each i.
    #[inline(always)]
    fn visit_codes<L: Lanes>(&self, l: L, mut visit: impl FnMut(usize, L::B)) {
        let (three, offset) = (l.splat_bytes(3), l.splat_bytes(32));
        for (part, (low, high)) in self.low.iter().zip(&self.high).enumerate() {
            for side in 0..2 {
                let (high, lows) = (l.bytes(high[side]), [l.bytes(low[0][side]), l.bytes(low[1][side])]);
                for sub in 0..4 {
                    let low = if sub < 2 { l.low(lows[sub]) } else { l.high(lows[sub - 2]) };
                    let high = l.shift_left(l.and(l.shift_right(high, 2 * sub as u32), three), 4);
                    visit(8 * part + 2 * sub + side, l.sub_bytes(l.or(low, high), offset));
                }
            }
        }
    }

    /// The scales of each 16 numbers.
    #[inline(always)]
    fn scales<L: Lanes>(&self, l: L) -> [f32; 16] {
        let mut scales = [0.0; 16];
        l.store(l.mul(l.splat_half(self.scale), l.widen(l.bytes(bytemuck::cast(self.scales)))), &mut scales);
        scales
    }
}

impl BlockNumbers<256> for Q6K {
    #[inline(always)]
    fn visit<L: Lanes>(&self, l: L, visitor: &mut impl Visitor<L>) {
        let scales = self.scales(l);
        self.visit_codes(
            l,
            #[inline(always)]
            |i, codes| visitor.take(l, i, l.mul(l.splat(scales[i]), l.widen(codes))),
        );
    }
}

impl BlockCodes<256> for Q6K {
    const SCALES: Scales = Scales::Of16;

    #[inline(always)]
    fn codes<L: Lanes>(&self, l: L, mut to: BlockTarget) {
        for (i, scale) in self.scales(l).into_iter().enumerate() {
            to.set_scale(i, scale);
        }
        self.visit_codes(
            l,
            #[inline(always)]
            |i, codes| to.set(l, i, codes),
        );
    }
}

/// Scales and minima of eight sub-blocks, with the block's factors applied.
struct SubBlockScales {
    scales: [f32; 16],
    minima: [f32; 16],
}

impl SubBlockScales {
    /// Writes the scales and minima of a block.
    #[inline(always)]
    fn write(&self, to: &mut BlockTarget) {
        for i in 0..8 {
            to.set_scale(2 * i, self.scales[i]);
            to.set_minimum(i, self.minima[i]);
        }
    }

    /// Decodes codes of sub-block i: the scale times the code, minus the minimum.
    #[inline(always)]
    fn above<L: Lanes>(&self, l: L, i: usize) -> impl Fn(L::B) -> L::F {
        let (scale, minimum) = (l.splat(self.scales[i]), l.splat(self.minima[i]));
        move |codes| l.sub(l.mul(scale, l.widen(codes)), minimum)
    }
}

/// Unpacks the scales and minima of eight sub-blocks, six bits each, and multiplies them with the block's factors. The first
/// four are the low six bits of a byte each. Of the last four, the low four bits of scale and minimum share a byte, and the
/// high two bits are the high bits of the first eight bytes.
#[inline(always)]
fn scales_and_minima<L: Lanes>(l: L, scale: [u8; 2], minimum: [u8; 2], packed: &[u8; 12]) -> SubBlockScales {
    let (mut scales, mut minima) = ([0; 16], [0; 16]);
    for i in 0..4 {
        let (a, b, both) = (packed[i], packed[4 + i], packed[8 + i]);
        (scales[i], minima[i]) = (a & 63, b & 63);
        (scales[4 + i], minima[4 + i]) = (both & 15 | a >> 2 & 48, both >> 4 | b >> 2 & 48);
    }
    let mut parts = SubBlockScales { scales: [0.0; 16], minima: [0.0; 16] };
    l.store(l.mul(l.splat_half(scale), l.widen(l.bytes(scales))), &mut parts.scales);
    l.store(l.mul(l.splat_half(minimum), l.widen(l.bytes(minima))), &mut parts.minima);
    parts
}
