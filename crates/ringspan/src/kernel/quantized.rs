//! Numbers quantized in blocks with a common factor, such as keys and values of a cache; kernels convert them to f32
//! when they pack them.

use super::vector::{prefetch, prefetch_far};
use half::f16;
use std::ops::Range;

const BLOCK: usize = BlockQ8_0::LEN;

/// A block of 32 numbers, each a factor in f16 times an 8-bit integer: the format `Q8_0` of GGUF files.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct BlockQ8_0 {
    /// The common factor: not negative, or NaN if a number of the block is not finite.
    pub scale: f16,
    /// The integers, from -127 to 127.
    pub quants: [i8; BLOCK],
}

// SAFETY: a factor and integers whose bits are all 0 are numbers.
unsafe impl bytemuck::Zeroable for BlockQ8_0 {}

impl BlockQ8_0 {
    /// Number of numbers in a block.
    pub const LEN: usize = 32;

    /// The block with the numbers nearest to these.
    ///
    /// No number is further away than half of the factor, which is the largest magnitude divided by 127 and rounded to f16.
    pub fn quantize(numbers: &[f32; BLOCK]) -> Self {
        let most = numbers.iter().fold(0f32, |most, x| most.max(x.abs()));
        if !numbers.iter().all(|x| x.is_finite()) {
            return Self { scale: f16::NAN, quants: [1; BLOCK] };
        }
        // Rounded up, the factor reaches the largest number with 127.
        let mut scale = f16::from_f32(most / 127.0);
        if scale.to_f32() * 127.0 < most {
            scale = f16::from_bits(scale.to_bits() + 1);
        }
        if !scale.is_finite() {
            return Self { scale: f16::NAN, quants: [1; BLOCK] };
        }
        let inverse = if most > 0.0 { scale.to_f32().recip() } else { 0.0 };
        Self { scale, quants: numbers.map(|x| (x * inverse).round() as i8) }
    }

    /// `blocks` blocks of zeros, which take memory when they are first written.
    pub fn zeros(blocks: usize) -> Vec<Self> {
        bytemuck::zeroed_vec(blocks)
    }
}

/// Numbers in blocks, from anywhere in a block on.
#[derive(Debug, Clone, Copy)]
pub struct QuantizedSlice<'a> {
    blocks: &'a [BlockQ8_0],
    /// Index of the first number, counted from the first block.
    start: usize,
    len: usize,
}

impl<'a> QuantizedSlice<'a> {
    /// All numbers of the blocks.
    pub fn new(blocks: &'a [BlockQ8_0]) -> Self {
        Self { blocks, start: 0, len: blocks.len() * BLOCK }
    }

    /// Number of numbers.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there is no number.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    #[inline(always)]
    pub(super) fn slice(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} numbers", self.len);
        Self { blocks: self.blocks, start: self.start + range.start, len: range.len() }
    }

    #[inline(always)]
    pub(super) fn get(self, at: usize) -> f32 {
        assert!(at < self.len, "number {at} of {}", self.len);
        let block = &self.blocks[(self.start + at) / BLOCK];
        widened(block.scale) * f32::from(block.quants[(self.start + at) % BLOCK])
    }

    /// Converts the numbers `at..at + to.len()` to f32 if they are in one block; returns whether they are.
    #[inline(always)]
    pub(super) fn copy_within_block(self, at: usize, to: &mut [f32]) -> bool {
        let first = (self.start + at) % BLOCK;
        let block = &self.blocks[(self.start + at) / BLOCK];
        let Some(quants) = block.quants.get(first..first + to.len()) else { return false };
        let scale = widened(block.scale);
        for (to, quant) in to.iter_mut().zip(quants) {
            *to = scale * f32::from(*quant);
        }
        true
    }

    #[inline(always)]
    pub(super) fn copy_to(self, to: &mut [f32]) {
        assert_eq!(self.len, to.len(), "numbers to copy");
        let mut at = 0;
        while at < to.len() {
            let end = to.len().min(at + BLOCK - (self.start + at) % BLOCK);
            self.copy_within_block(at, &mut to[at..end]);
            at = end;
        }
    }

    /// The blocks that have some of the numbers.
    #[inline(always)]
    fn own_blocks(self) -> &'a [BlockQ8_0] {
        &self.blocks[self.start / BLOCK..(self.start + self.len).div_ceil(BLOCK)]
    }

    #[inline(always)]
    pub(super) fn prefetch(self) {
        prefetch(self.own_blocks());
    }

    #[inline(always)]
    pub(super) fn prefetch_far(self) {
        prefetch_far(self.own_blocks());
    }

    #[inline(always)]
    pub(super) fn is_finite(self) -> bool {
        self.is_empty() || self.own_blocks().iter().all(|block| block.scale.is_finite())
    }
}

/// A factor in f32. It is not negative, so its exponent and fraction are those of an f32 that is 2^112 times smaller; this compiles to
/// three instructions, in vectors as well.
#[inline(always)]
fn widened(scale: f16) -> f32 {
    let bits = u32::from(scale.to_bits());
    if bits >= 0x7C00 { f32::NAN } else { f32::from_bits(bits << 13) * f32::from_bits((127 + 112) << 23) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(seed: u32, size: f32) -> [f32; BLOCK] {
        std::array::from_fn(|i| {
            let hash = (seed * 977 + i as u32 + 1).wrapping_mul(0x9e37_79b9);
            size * ((hash ^ (hash >> 15)) as f32 / u32::MAX as f32 - 0.5)
        })
    }

    fn all_of(blocks: &[BlockQ8_0]) -> Vec<f32> {
        let mut all = vec![0.0; blocks.len() * BLOCK];
        QuantizedSlice::new(blocks).copy_to(&mut all);
        all
    }

    #[test]
    fn a_factor_is_widened_exactly() {
        for bits in 0..0x7C00 {
            let scale = f16::from_bits(bits);
            assert_eq!(widened(scale).to_bits(), scale.to_f32().to_bits(), "{bits:x}");
        }
        assert!(widened(f16::INFINITY).is_nan() && widened(f16::NAN).is_nan());
    }

    #[test]
    fn no_number_is_further_away_than_half_of_the_factor() {
        for (seed, size) in [(1, 1.0), (2, 1e-3), (3, 900.0), (4, 2e-6), (5, 1e6), (6, 0.0)] {
            let exact = numbers(seed, size);
            let block = BlockQ8_0::quantize(&exact);
            let scale = block.scale.to_f32();
            let most = exact.iter().fold(0f32, |most, x| most.max(x.abs()));
            assert!(scale * 127.0 >= most && scale <= most / 127.0 * 1.001 + 6e-8, "{scale} for {most}");
            for (x, y) in exact.iter().zip(all_of(&[block])) {
                assert!((x - y).abs() <= scale * 0.5001, "{x} became {y}, the factor is {scale}");
            }
        }
    }

    #[test]
    fn numbers_that_are_not_finite_or_too_large_are_seen() {
        for bad in [f32::NAN, f32::INFINITY, -f32::INFINITY, f32::MAX, -1e7] {
            let mut exact = numbers(1, 1.0);
            exact[5] = bad;
            let block = BlockQ8_0::quantize(&exact);
            assert!(all_of(&[block]).iter().all(|x| x.is_nan()), "{bad}");
            assert!(!QuantizedSlice::new(&[block]).is_finite());
        }
        assert!(QuantizedSlice::new(&BlockQ8_0::zeros(2)).is_finite());
        assert!(all_of(&BlockQ8_0::zeros(2)).iter().all(|x| *x == 0.0));
    }

    #[test]
    fn slices_begin_and_end_anywhere() {
        let blocks = [1, 2, 3].map(|seed| BlockQ8_0::quantize(&numbers(seed, seed as f32)));
        let all = all_of(&blocks);
        for (from, to) in [(0, 96), (5, 6), (31, 33), (40, 90), (64, 96), (96, 96)] {
            let slice = QuantizedSlice::new(&blocks).slice(0..to).slice(from..to);
            let mut some = vec![0.0; to - from];
            slice.copy_to(&mut some);
            assert_eq!((slice.len(), some.as_slice()), (to - from, &all[from..to]));
            assert!(slice.is_finite());
            assert!((from..to).all(|at| slice.get(at - from) == all[at]));
        }
    }
}
