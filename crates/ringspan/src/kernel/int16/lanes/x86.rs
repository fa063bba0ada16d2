//! Vectors of 16 integers and numbers on x86-64: two of AVX2, or one of AVX-512, without and with VNNI.

use super::{Lanes, ROWS, Tile};
use crate::kernel::int16::{BLOCK, COLUMNS};
use bytemuck::cast;
use std::arch::x86_64::*;

/// A token for machines with AVX2 and FMA.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx2(pub(in super::super) ());

/// A token for machines with AVX2, FMA, AVX512F and AVX512BW.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512(pub(in super::super) ());

/// A token for machines with the instructions of [`Avx512`], and AVX512-VNNI.
#[derive(Clone, Copy)]
pub(in super::super) struct Vnni(pub(in super::super) ());

/// Calls intrinsics of the instruction set of the token at hand.
macro_rules! of_token {
    ($call:expr) => {{
        // SAFETY: a token exists only on machines with its instructions; memory is accessed through references to arrays of its size.
        unsafe { $call }
    }};
}

/// Operations that use AVX2, which all tokens have.
macro_rules! shared {
    (|$halves:ident| $join:expr) => {
        #[inline(always)]
        fn row_products<const N: usize>(
            self,
            codes: &[[i8; COLUMNS]; ROWS],
            part: usize,
            x: &[[i16; 2]; COLUMNS / 2],
        ) -> Self::I {
            of_token!({
                let $halves = row_products::<N>(codes, part, x);
                $join
            })
        }

        #[inline(always)]
        fn largest(self, block: &[f32; BLOCK]) -> f32 {
            of_token!(largest(block))
        }

        #[inline(always)]
        fn round(self, block: &[f32; BLOCK], factor: f32, to: &mut [[i16; 2]; BLOCK / 2]) -> i32 {
            of_token!(round(block, factor, to))
        }
    };
}

#[inline]
#[target_feature(enable = "avx2")]
fn largest(block: &[f32; BLOCK]) -> f32 {
    let mut most = _mm256_setzero_si256();
    for x in block.as_chunks::<8>().0 {
        let size = _mm256_and_si256(cast(*x), _mm256_set1_epi32(0x7fff_ffff));
        // As integers, the bits of absolute values are in the order of the values, with NaN above infinity.
        most = _mm256_max_epu32(most, size);
    }
    let most = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256::<1>(most));
    let most = _mm_max_epu32(most, _mm_shuffle_epi32::<0b01_00_11_10>(most));
    let most = _mm_max_epu32(most, _mm_shuffle_epi32::<0b10_11_00_01>(most));
    f32::from_bits(_mm_cvtsi128_si32(most) as u32)
}

#[inline]
#[target_feature(enable = "avx2")]
fn round(block: &[f32; BLOCK], factor: f32, to: &mut [[i16; 2]; BLOCK / 2]) -> i32 {
    let (factor, mut sums) = (_mm256_set1_ps(factor), _mm256_setzero_si256());
    for (x, to) in block.as_chunks::<16>().0.iter().zip(to.as_chunks_mut::<8>().0) {
        let [low, high]: [__m256; 2] = cast(*x);
        let (low, high) =
            (_mm256_cvtps_epi32(_mm256_mul_ps(low, factor)), _mm256_cvtps_epi32(_mm256_mul_ps(high, factor)));
        sums = _mm256_add_epi32(sums, _mm256_add_epi32(low, high));
        // The instruction packs each half of the vectors separately.
        *to = cast(_mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high)));
    }
    let sums = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
    let sums = _mm_add_epi32(sums, _mm_shuffle_epi32::<0b01_00_11_10>(sums));
    _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32::<0b10_11_00_01>(sums)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn row_products<const N: usize>(
    codes: &[[i8; COLUMNS]; ROWS],
    part: usize,
    x: &[[i16; 2]; COLUMNS / 2],
) -> [__m256i; 2] {
    let x = x.as_chunks::<8>().0;
    let mut halves = [_mm256_setzero_si256(); 2];
    for (half, codes) in halves.iter_mut().zip(codes.as_chunks::<8>().0) {
        let mut sums = [_mm256_setzero_si256(); 8];
        for r in 0..8 {
            let row = codes[r].as_chunks::<16>().0;
            for i in 0..N {
                let products = _mm256_madd_epi16(_mm256_cvtepi8_epi16(cast(row[part + i])), cast(x[part + i]));
                sums[r] = if i == 0 { products } else { _mm256_add_epi32(sums[r], products) };
            }
        }
        // Sums of neighbours, then of neighbours among these: each half of a vector has a part of the sums of four rows.
        let (a, b) = (_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
        let (c, d) = (_mm256_hadd_epi32(sums[4], sums[5]), _mm256_hadd_epi32(sums[6], sums[7]));
        let (first, last) = (_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
        let low = _mm256_permute2x128_si256::<0x20>(first, last);
        *half = _mm256_add_epi32(low, _mm256_permute2x128_si256::<0x31>(first, last));
    }
    halves
}

impl Lanes for Avx2 {
    type I = [__m256i; 2];
    type F = [__m256; 2];
    type Pairs = [__m256i; 2];
    const TILE: Tile = Tile::Narrow;
    const FEW: usize = 6;
    shared!(|halves| halves);

    #[inline(always)]
    fn zeros(self) -> [__m256i; 2] {
        of_token!([_mm256_setzero_si256(); 2])
    }

    #[inline(always)]
    fn load_pairs(self, pairs: &[[i16; 2]; ROWS]) -> [__m256i; 2] {
        let (low, high) = pairs.split_at(ROWS / 2);
        of_token!([_mm256_loadu_si256(low.as_ptr().cast()), _mm256_loadu_si256(high.as_ptr().cast())])
    }

    #[inline(always)]
    fn add_products(self, sums: [__m256i; 2], pairs: [__m256i; 2], pair: [i16; 2]) -> [__m256i; 2] {
        of_token!({
            let pair = _mm256_set1_epi32(cast(pair));
            [
                _mm256_add_epi32(sums[0], _mm256_madd_epi16(pairs[0], pair)),
                _mm256_add_epi32(sums[1], _mm256_madd_epi16(pairs[1], pair)),
            ]
        })
    }

    #[inline(always)]
    fn convert(self, x: [__m256i; 2]) -> [__m256; 2] {
        of_token!([_mm256_cvtepi32_ps(x[0]), _mm256_cvtepi32_ps(x[1])])
    }

    #[inline(always)]
    fn load(self, from: &[f32; ROWS]) -> [__m256; 2] {
        let (low, high) = from.split_at(ROWS / 2);
        of_token!([_mm256_loadu_ps(low.as_ptr()), _mm256_loadu_ps(high.as_ptr())])
    }

    #[inline(always)]
    fn store(self, x: [__m256; 2], to: &mut [f32; ROWS]) {
        let (low, high) = to.split_at_mut(ROWS / 2);
        of_token!({
            _mm256_storeu_ps(low.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(high.as_mut_ptr(), x[1]);
        });
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [__m256; 2] {
        of_token!([_mm256_set1_ps(x); 2])
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        of_token!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        of_token!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }

    #[inline(always)]
    fn transpose(self, rows: [&[i8; 16]; ROWS], to: &mut [[[i16; 2]; ROWS]; 8]) {
        for (pairs, to) in transposed(rows).into_iter().zip(to) {
            let (low, high) = to.split_at_mut(ROWS / 2);
            of_token!({
                _mm256_storeu_si256(low.as_mut_ptr().cast(), _mm256_cvtepi8_epi16(_mm256_castsi256_si128(pairs)));
                _mm256_storeu_si256(
                    high.as_mut_ptr().cast(),
                    _mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(pairs)),
                );
            });
        }
    }
}

/// The pairs of neighbouring columns of 16 rows, still as bytes: the pairs of the first eight rows, then of the last eight. The machine
/// must have AVX2.
#[inline(always)]
fn transposed(rows: [&[i8; 16]; ROWS]) -> [__m256i; 8] {
    of_token!({
        let mut x = [_mm256_setzero_si256(); 8];
        for (i, x) in x.iter_mut().enumerate() {
            let (low, high) = (_mm_loadu_si128(rows[i].as_ptr().cast()), _mm_loadu_si128(rows[i + 8].as_ptr().cast()));
            *x = _mm256_set_m128i(high, low);
        }
        // Each step joins elements of twice the size. Rows 2 i and 2 i + 1:
        let mut y = x;
        for i in 0..4 {
            y[2 * i] = _mm256_unpacklo_epi16(x[2 * i], x[2 * i + 1]);
            y[2 * i + 1] = _mm256_unpackhi_epi16(x[2 * i], x[2 * i + 1]);
        }
        // Four rows, first for the columns of the low halves, then for those of the high halves.
        for half in 0..2 {
            for side in 0..2 {
                let (a, b) = (y[4 * half + side], y[4 * half + 2 + side]);
                x[4 * half + 2 * side] = _mm256_unpacklo_epi32(a, b);
                x[4 * half + 2 * side + 1] = _mm256_unpackhi_epi32(a, b);
            }
        }
        for i in 0..4 {
            y[2 * i] = _mm256_unpacklo_epi64(x[i], x[i + 4]);
            y[2 * i + 1] = _mm256_unpackhi_epi64(x[i], x[i + 4]);
        }
        y
    })
}

/// Implements vectors of AVX-512 for a token, with an instruction for sums of products.
macro_rules! avx512 {
    ($token:ty, |$sums:ident, $pairs:ident, $pair:ident| $add_products:expr) => {
        impl Lanes for $token {
            type I = __m512i;
            type F = __m512;
            type Pairs = __m512i;
            const TILE: Tile = Tile::Wide;
            const FEW: usize = 3;
            shared!(|halves| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(halves[0]), halves[1]));

            #[inline(always)]
            fn zeros(self) -> __m512i {
                of_token!(_mm512_setzero_si512())
            }

            #[inline(always)]
            fn load_pairs(self, pairs: &[[i16; 2]; ROWS]) -> __m512i {
                of_token!(_mm512_loadu_si512(pairs.as_ptr().cast()))
            }

            #[inline(always)]
            fn add_products(self, $sums: __m512i, $pairs: __m512i, pair: [i16; 2]) -> __m512i {
                of_token!({
                    let $pair = _mm512_set1_epi32(cast(pair));
                    $add_products
                })
            }

            #[inline(always)]
            fn convert(self, x: __m512i) -> __m512 {
                of_token!(_mm512_cvtepi32_ps(x))
            }

            #[inline(always)]
            fn load(self, from: &[f32; ROWS]) -> __m512 {
                of_token!(_mm512_loadu_ps(from.as_ptr()))
            }

            #[inline(always)]
            fn store(self, x: __m512, to: &mut [f32; ROWS]) {
                of_token!(_mm512_storeu_ps(to.as_mut_ptr(), x));
            }

            #[inline(always)]
            fn splat(self, x: f32) -> __m512 {
                of_token!(_mm512_set1_ps(x))
            }

            #[inline(always)]
            fn mul(self, a: __m512, b: __m512) -> __m512 {
                of_token!(_mm512_mul_ps(a, b))
            }

            #[inline(always)]
            fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
                of_token!(_mm512_fmadd_ps(a, b, c))
            }

            #[inline(always)]
            fn transpose(self, rows: [&[i8; 16]; ROWS], to: &mut [[[i16; 2]; ROWS]; 8]) {
                for (pairs, to) in transposed(rows).into_iter().zip(to) {
                    of_token!(_mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_cvtepi8_epi16(pairs)));
                }
            }
        }
    };
}

avx512!(Avx512, |sums, pairs, pair| _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, pair)));
avx512!(Vnni, |sums, pairs, pair| _mm512_dpwssd_epi32(sums, pairs, pair));
