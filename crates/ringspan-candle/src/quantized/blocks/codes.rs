//! The codes of blocks as integers, for products in integers.

use super::{Iq4Nl, LESS_EIGHT, Mxfp4, Q4_0, Q5_0, Q8_0, TWICE_FP4, UNEVEN};
use crate::quantized::lanes::{Lanes, f16_to_f32};
use bytemuck::{AnyBitPattern, cast_mut};
use ringspan::kernel::int16::{COLUMNS, RowCodes, Scales};

/// A block of LEN numbers, each an integer times a scale, less a minimum where the format has minima.
pub(in crate::quantized) trait BlockCodes<const LEN: usize>: AnyBitPattern {
    /// How many numbers share a scale, and whether there are minima.
    const SCALES: Scales;

    /// Writes the codes and scales of the block.
    fn codes<L: Lanes>(&self, l: L, to: BlockTarget);
}

/// Where the codes and scales of a block go: a row and the first column.
pub(in crate::quantized) struct BlockTarget<'a> {
    pub(in crate::quantized) codes: &'a mut RowCodes,
    pub(in crate::quantized) row: usize,
    pub(in crate::quantized) column: usize,
}

impl BlockTarget<'_> {
    /// Writes codes 32 i to 32 i + 31 of the block.
    #[inline(always)]
    pub(super) fn set<L: Lanes>(&mut self, l: L, i: usize, codes: L::B) {
        let row: &mut [i8; COLUMNS] = &mut self.codes.codes[self.row];
        l.store_bytes(codes, cast_mut(&mut row.as_chunks_mut::<32>().0[self.column / 32 + i]));
    }

    /// Writes the scale of codes 16 i to 16 i + 15, or of 32 where as many share it.
    #[inline(always)]
    pub(super) fn set_scale(&mut self, i: usize, scale: f32) {
        self.codes.scales[self.column / 16 + i][self.row] = scale;
    }

    /// Writes the minimum of codes 32 i to 32 i + 31.
    #[inline(always)]
    pub(super) fn set_minimum(&mut self, i: usize, minimum: f32) {
        self.codes.minima[self.column / 32 + i][self.row] = minimum;
    }

    /// Writes the 32 codes of a block, and their scale.
    #[inline(always)]
    fn set_all<L: Lanes>(&mut self, l: L, scale: f32, codes: L::B) {
        self.set(l, 0, codes);
        self.set_scale(0, scale);
    }
}

impl BlockCodes<32> for Q4_0 {
    const SCALES: Scales = Scales::Of32;

    #[inline(always)]
    fn codes<L: Lanes>(&self, l: L, mut to: BlockTarget) {
        to.set_all(l, f16_to_f32(self.scale), l.choose(&LESS_EIGHT, l.nibbles(&self.codes)));
    }
}

impl BlockCodes<32> for Q5_0 {
    const SCALES: Scales = Scales::Of32;

    #[inline(always)]
    fn codes<L: Lanes>(&self, l: L, mut to: BlockTarget) {
        to.set_all(l, f16_to_f32(self.scale), l.five_bits(&self.codes, self.high));
    }
}

impl BlockCodes<32> for Q8_0 {
    const SCALES: Scales = Scales::Of32;

    #[inline(always)]
    fn codes<L: Lanes>(&self, l: L, mut to: BlockTarget) {
        to.set_all(l, f16_to_f32(self.scale), l.bytes(&self.codes));
    }
}

impl BlockCodes<32> for Iq4Nl {
    const SCALES: Scales = Scales::Of32;

    #[inline(always)]
    fn codes<L: Lanes>(&self, l: L, mut to: BlockTarget) {
        to.set_all(l, f16_to_f32(self.scale), l.choose(&UNEVEN, l.nibbles(&self.codes)));
    }
}

impl BlockCodes<32> for Mxfp4 {
    const SCALES: Scales = Scales::Of32;

    #[inline(always)]
    fn codes<L: Lanes>(&self, l: L, mut to: BlockTarget) {
        to.set_all(l, self.scale(), l.choose(&TWICE_FP4, l.nibbles(&self.codes)));
    }
}
