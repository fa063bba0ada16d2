//! ggml's K-quants: blocks of 256 numbers in sub-blocks, whose scales (and minima) are quantized, too.

use super::{BlockCodes, BlockNumbers, BlockTarget, Visitor};
use crate::quantized::lanes::Lanes;
use bytemuck::{AnyBitPattern, Zeroable};
use ringspan::kernel::int16::Scales;

#[repr(C)]
#[derive(Clone, Copy, AnyBitPattern)]
pub(in crate::quantized) struct Q4K {
    scale: [u8; 2],
    minimum: [u8; 2],
    /// Scales and minima of eight sub-blocks of 32 numbers, packed as [`scales_and_minima`] describes.
    parts: [u8; 12],
    /// Each group of 32 bytes holds a sub-block in its low halves, and the next sub-block in its high halves.
    codes: [[u8; 32]; 4],
}

impl BlockNumbers<256> for Q4K {
    const HAS_MINIMA: bool = true;
    const PARTS: usize = 4;
    type Scales = SubBlockScales;

    #[inline(always)]
    fn scales<L: Lanes>(&self, l: L) -> SubBlockScales {
        scales_and_minima(l, self.scale, self.minimum, &self.parts)
    }

    #[inline(always)]
    fn visit_part<L: Lanes>(&self, l: L, part: usize, scales: &SubBlockScales, visitor: &mut impl Visitor<L>) {
        let [low, high] = l.codes_of_nibbles(&self.codes[part]);
        let [first, second] = [2 * part, 2 * part + 1];
        visitor.take_above(l, first, scales.scales[first], scales.minima[first], low);
        visitor.take_above(l, second, scales.scales[second], scales.minima[second], high);
    }

    #[inline(always)]
    fn visit_minima<L: Lanes>(l: L, scales: &SubBlockScales, visitor: &mut impl Visitor<L>) {
        visitor.minima(l, &scales.minima);
    }
}

impl BlockCodes<256> for Q4K {
    const SCALES: Scales = Scales::Of32WithMinima;

    #[inline(always)]
    fn codes<L: Lanes>(&self, l: L, mut to: BlockTarget) {
        self.scales(l).write(&mut to);
        for (i, codes) in self.codes.iter().enumerate() {
            let codes = l.bytes(codes);
            to.set(l, 2 * i, l.low(codes));
            to.set(l, 2 * i + 1, l.high(codes));
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
    high: [u8; 32],
    /// The low four bits of each number, laid out as in [`Q4K`].
    codes: [[u8; 32]; 4],
}

impl Q5K {
    /// The codes of sub-blocks 2 part and 2 part + 1.
    #[inline(always)]
    fn unpacked<L: Lanes>(&self, l: L, part: usize) -> [L::B; 2] {
        let (codes, one) = (l.bytes(&self.codes[part]), l.splat_bytes(1));
        let bits = l.shift_right(l.bytes(&self.high), 2 * part as u32);
        let fifth = [l.and(bits, one), l.and(l.shift_right(bits, 1), one)];
        [l.or(l.low(codes), l.shift_left(fifth[0], 4)), l.or(l.high(codes), l.shift_left(fifth[1], 4))]
    }
}

impl BlockNumbers<256> for Q5K {
    const HAS_MINIMA: bool = true;
    const PARTS: usize = 4;
    type Scales = SubBlockScales;

    #[inline(always)]
    fn scales<L: Lanes>(&self, l: L) -> SubBlockScales {
        scales_and_minima(l, self.scale, self.minimum, &self.parts)
    }

    #[inline(always)]
    fn visit_part<L: Lanes>(&self, l: L, part: usize, scales: &SubBlockScales, visitor: &mut impl Visitor<L>) {
        let [low, high] = self.unpacked(l, part);
        let [first, second] = [2 * part, 2 * part + 1];
        visitor.take_above(l, first, scales.scales[first], scales.minima[first], l.codes(low));
        visitor.take_above(l, second, scales.scales[second], scales.minima[second], l.codes(high));
    }

    #[inline(always)]
    fn visit_minima<L: Lanes>(l: L, scales: &SubBlockScales, visitor: &mut impl Visitor<L>) {
        visitor.minima(l, &scales.minima);
    }
}

impl BlockCodes<256> for Q5K {
    const SCALES: Scales = Scales::Of32WithMinima;

    #[inline(always)]
    fn codes<L: Lanes>(&self, l: L, mut to: BlockTarget) {
        self.scales(l).write(&mut to);
        for part in 0..Self::PARTS {
            let [low, high] = self.unpacked(l, part);
            to.set(l, 2 * part, low);
            to.set(l, 2 * part + 1, high);
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, AnyBitPattern)]
pub(in crate::quantized) struct Q6K {
    /// The low four bits: 64 bytes for each half of the block, whose low halves are sub-blocks 0 and 1 of 32 numbers, and
    /// whose high halves are sub-blocks 2 and 3.
    low: [[[u8; 32]; 2]; 2],
    /// The high two bits: 32 bytes for each half of the block, with those of sub-block i in bits 2 i and 2 i + 1.
    high: [[u8; 32]; 2],
    /// A scale for each 16 numbers.
    scales: [i8; 16],
    scale: [u8; 2],
}

impl Q6K {
    /// The codes of the four sub-blocks of a half of the block.
    #[inline(always)]
    fn unpacked<L: Lanes>(&self, l: L, half: usize) -> [L::B; 4] {
        let (high, lows) = (l.bytes(&self.high[half]), self.low[half].each_ref());
        let lows = [l.bytes(lows[0]), l.bytes(lows[1])];
        let (three, offset) = (l.splat_bytes(3), l.splat_bytes(32));
        let mut codes = [l.low(lows[0]), l.low(lows[1]), l.high(lows[0]), l.high(lows[1])];
        for (i, codes) in codes.iter_mut().enumerate() {
            let high = l.shift_left(l.and(l.shift_right(high, 2 * i as u32), three), 4);
            *codes = l.sub_bytes(l.or(*codes, high), offset);
        }
        codes
    }
}

impl BlockNumbers<256> for Q6K {
    const PARTS: usize = 2;
    /// A scale for each 16 numbers.
    type Scales = [f32; 16];

    #[inline(always)]
    fn scales<L: Lanes>(&self, l: L) -> [f32; 16] {
        let mut scales = [0.0; 16];
        l.store(l.mul(l.splat_half(self.scale), l.widen_16(&self.scales)), &mut scales);
        scales
    }

    #[inline(always)]
    fn visit_part<L: Lanes>(&self, l: L, part: usize, scales: &[f32; 16], visitor: &mut impl Visitor<L>) {
        for (i, codes) in self.unpacked(l, part).into_iter().enumerate() {
            let i = 4 * part + i;
            visitor.take_halves(l, i, [scales[2 * i], scales[2 * i + 1]], l.codes(codes));
        }
    }
}

impl BlockCodes<256> for Q6K {
    const SCALES: Scales = Scales::Of16;

    #[inline(always)]
    fn codes<L: Lanes>(&self, l: L, mut to: BlockTarget) {
        for (i, scale) in self.scales(l).into_iter().enumerate() {
            to.set_scale(i, scale);
        }
        for part in 0..Self::PARTS {
            for (i, codes) in self.unpacked(l, part).into_iter().enumerate() {
                to.set(l, 4 * part + i, codes);
            }
        }
    }
}

/// Scales and minima of eight sub-blocks, with the block's factors applied.
#[derive(Clone, Copy, Zeroable)]
pub(in crate::quantized) struct SubBlockScales {
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
}

/// Unpacks the scales and minima of eight sub-blocks, six bits each, and multiplies them with the block's factors. The first
/// four are the low six bits of a byte each. Of the last four, the low four bits of scale and minimum share a byte, and the
/// high two bits are the high bits of the first eight bytes.
#[inline(always)]
fn scales_and_minima<L: Lanes>(l: L, scale: [u8; 2], minimum: [u8; 2], packed: &[u8; 12]) -> SubBlockScales {
    let (mut scales, mut minima) = ([0i8; 16], [0i8; 16]);
    for i in 0..4 {
        let (a, b, both) = (packed[i], packed[4 + i], packed[8 + i]);
        (scales[i], minima[i]) = ((a & 63) as i8, (b & 63) as i8);
        (scales[4 + i], minima[4 + i]) = ((both & 15 | a >> 2 & 48) as i8, (both >> 4 | b >> 2 & 48) as i8);
    }
    let mut parts = SubBlockScales { scales: [0.0; 16], minima: [0.0; 16] };
    l.store(l.mul(l.splat_half(scale), l.widen_16(&scales)), &mut parts.scales);
    l.store(l.mul(l.splat_half(minimum), l.widen_16(&minima)), &mut parts.minima);
    parts
}
