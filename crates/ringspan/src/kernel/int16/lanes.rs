//! Vectors of 16 integers and numbers, implemented for each instruction set.

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512, Vnni};

use super::{BLOCK, COLUMNS, ROWS};

/// A token that proves that the machine has an instruction set, with its operations on vectors with a lane for each row of a panel.
///
/// Every method is `inline(always)`, because it must be inlined into a function with the matching `target_feature`.
pub(super) trait Lanes: Copy {
    /// A vector of integers of 32 bits.
    type I: Copy;
    /// A vector of f32.
    type F: Copy;
    /// Pairs of integers of 16 bits, one pair in each lane.
    type Pairs: Copy;
    /// How many tokens and panels are multiplied at once, limited by the registers.
    const TILE: Tile;
    /// The most tokens for which codes are multiplied row by row: for a few, packing panels would take longer than it saves.
    const FEW: usize;

    fn zeros(self) -> Self::I;
    fn load_pairs(self, pairs: &[[i16; 2]; ROWS]) -> Self::Pairs;
    /// Adds the products of both integers of each pair with those of `pair`.
    fn add_products(self, sums: Self::I, pairs: Self::Pairs, pair: [i16; 2]) -> Self::I;
    fn convert(self, x: Self::I) -> Self::F;
    fn load(self, from: &[f32; ROWS]) -> Self::F;
    fn store(self, x: Self::F, to: &mut [f32; ROWS]);
    fn splat(self, x: f32) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once where the machine can.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The largest absolute value; NaN if there is one.
    fn largest(self, block: &[f32; BLOCK]) -> f32;
    /// Multiplies with `factor`, rounds to the nearest integers, of 16 bits, ties to even, and returns their sum.
    fn round(self, block: &[f32; BLOCK], factor: f32, to: &mut [[i16; 2]; BLOCK / 2]) -> i32;
    /// The sums of the products of each row's codes with x, in N times 16 columns from column `16 * part` on.
    fn row_products<const N: usize>(
        self,
        codes: &[[i8; COLUMNS]; ROWS],
        part: usize,
        x: &[[i16; 2]; COLUMNS / 2],
    ) -> Self::I;
    /// Pairs the codes of 16 rows in 16 columns: vector i has columns 2 i and 2 i + 1 of each row.
    fn transpose(self, rows: [&[i8; 16]; ROWS], to: &mut [[[i16; 2]; ROWS]; 8]);
}

/// How many tokens are multiplied with how many panels at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tile {
    /// Four tokens and one panel.
    Narrow,
    /// Eight tokens and two panels.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only AVX-512 has as many registers"))]
    Wide,
}

/// Plain Rust, for machines without the others.
#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Lanes for Portable {
    type I = [i32; ROWS];
    type F = [f32; ROWS];
    type Pairs = [[i16; 2]; ROWS];
    const TILE: Tile = Tile::Narrow;
    const FEW: usize = 6;

    #[inline(always)]
    fn zeros(self) -> [i32; ROWS] {
        [0; ROWS]
    }

    #[inline(always)]
    fn load_pairs(self, pairs: &[[i16; 2]; ROWS]) -> [[i16; 2]; ROWS] {
        *pairs
    }

    #[inline(always)]
    fn add_products(self, mut sums: [i32; ROWS], pairs: [[i16; 2]; ROWS], [x, y]: [i16; 2]) -> [i32; ROWS] {
        for (sum, [a, b]) in sums.iter_mut().zip(pairs) {
            *sum += i32::from(a) * i32::from(x) + i32::from(b) * i32::from(y);
        }
        sums
    }

    #[inline(always)]
    fn convert(self, x: [i32; ROWS]) -> [f32; ROWS] {
        x.map(|x| x as f32)
    }

    #[inline(always)]
    fn load(self, from: &[f32; ROWS]) -> [f32; ROWS] {
        *from
    }

    #[inline(always)]
    fn store(self, x: [f32; ROWS], to: &mut [f32; ROWS]) {
        *to = x;
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; ROWS] {
        [x; ROWS]
    }

    #[inline(always)]
    fn mul(self, mut a: [f32; ROWS], b: [f32; ROWS]) -> [f32; ROWS] {
        for (a, b) in a.iter_mut().zip(b) {
            *a *= b;
        }
        a
    }

    #[inline(always)]
    fn mul_add(self, a: [f32; ROWS], b: [f32; ROWS], mut c: [f32; ROWS]) -> [f32; ROWS] {
        for ((c, a), b) in c.iter_mut().zip(a).zip(b) {
            *c += a * b;
        }
        c
    }

    #[inline(always)]
    fn largest(self, block: &[f32; BLOCK]) -> f32 {
        // As integers, the bits of absolute values are in the order of the values, with NaN above infinity.
        f32::from_bits(block.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7fff_ffff)))
    }

    #[inline(always)]
    fn round(self, block: &[f32; BLOCK], factor: f32, to: &mut [[i16; 2]; BLOCK / 2]) -> i32 {
        let mut sum = 0;
        for (code, x) in to.as_flattened_mut().iter_mut().zip(block) {
            *code = (x * factor).round_ties_even() as i16;
            sum += i32::from(*code);
        }
        sum
    }

    #[inline(always)]
    fn row_products<const N: usize>(
        self,
        codes: &[[i8; COLUMNS]; ROWS],
        part: usize,
        x: &[[i16; 2]; COLUMNS / 2],
    ) -> [i32; ROWS] {
        let (columns, mut sums) = (16 * part..16 * (part + N), [0; ROWS]);
        for (sum, row) in sums.iter_mut().zip(codes) {
            for (code, x) in row[columns.clone()].iter().zip(&x.as_flattened()[columns.clone()]) {
                *sum += i32::from(*code) * i32::from(*x);
            }
        }
        sums
    }

    #[inline(always)]
    fn transpose(self, rows: [&[i8; 16]; ROWS], to: &mut [[[i16; 2]; ROWS]; 8]) {
        for (i, pairs) in to.iter_mut().enumerate() {
            for (pair, row) in pairs.iter_mut().zip(rows) {
                *pair = [i16::from(row[2 * i]), i16::from(row[2 * i + 1])];
            }
        }
    }
}
