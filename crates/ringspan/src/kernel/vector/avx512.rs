//! Vectors of 16 f32 with AVX-512.

use super::{Simd, exp2_slope};
use half::bf16;
use std::arch::x86_64::*;

/// A token for machines with AVX-512F and, if products take pairs of bf16, with AVX-512BW and AVX512-BF16; only
/// [`Avx512::detect`] makes one.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const PAIRS: bool>(());

impl<const PAIRS: bool> Avx512<PAIRS> {
    /// Returns the token, if this machine has the instructions.
    pub(crate) fn detect() -> Option<Self> {
        let pairs = || is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512bf16");
        (is_x86_feature_detected!("avx512f") && (!PAIRS || pairs())).then_some(Self(()))
    }
}

/// Calls an intrinsic that needs AVX-512F and, for a token of pairs, its additional features.
macro_rules! avx512 {
    ($call:expr) => {{
        // SAFETY: a token exists only on machines with AVX-512F, a token of pairs only on those with its additional
        // features.
        unsafe { $call }
    }};
}

/// The permutation that interleaves the two halves of a vector of 16-bit numbers.
const INTERLEAVE_HALVES: [u16; 32] = {
    let mut turns = [0; 32];
    let mut at = 0;
    while at < 32 {
        turns[at] = (at / 2 + at % 2 * 16) as u16;
        at += 1;
    }
    turns
};

impl<const PAIRS: bool> Simd for Avx512<PAIRS> {
    type V = __m512;
    const LANES: usize = 16;
    const COLUMNS: usize = 4;
    const PAIR: usize = if PAIRS { 2 } else { 1 };

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        avx512!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        avx512!(_mm512_loadu_ps(from))
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m512 {
        avx512!({
            let numbers = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(numbers))
        })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: __m512) {
        avx512!(_mm512_storeu_ps(to, x))
    }

    #[inline(always)]
    unsafe fn store_halves(self, first: *mut f32, second: *mut f32, x: __m512) {
        avx512!({
            let above = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x));
            _mm256_storeu_ps(first, _mm512_castps512_ps256(x));
            _mm256_storeu_ps(second, _mm256_castpd_ps(above));
        })
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        avx512!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn product(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        if !PAIRS {
            return self.fma(a, b, c);
        }
        // SAFETY: both are 64 bytes of plain numbers.
        let halves = |x: __m512| unsafe { std::mem::transmute::<__m512, __m512bh>(x) };
        avx512!(_mm512_dpbf16_ps(c, halves(a), halves(b)))
    }

    #[inline(always)]
    fn pair(self, first: __m512, second: __m512) -> __m512 {
        if !PAIRS {
            return first;
        }
        avx512!({
            let turns = _mm512_loadu_si512(INTERLEAVE_HALVES.as_ptr().cast());
            let both = _mm512_castps_si512(self.pair_along(first, second));
            _mm512_castsi512_ps(_mm512_permutexvar_epi16(turns, both))
        })
    }

    #[inline(always)]
    unsafe fn load_pairs(self, first: *const bf16, second: *const bf16) -> __m512 {
        if !PAIRS {
            return self.splat(0.0);
        }
        avx512!({
            let turns = _mm512_loadu_si512(INTERLEAVE_HALVES.as_ptr().cast());
            let (first, second) = (_mm256_loadu_si256(first.cast()), _mm256_loadu_si256(second.cast()));
            let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second);
            _mm512_castsi512_ps(_mm512_permutexvar_epi16(turns, both))
        })
    }

    #[inline(always)]
    fn pair_along(self, first: __m512, second: __m512) -> __m512 {
        if !PAIRS {
            return first;
        }
        avx512!(std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(second, first)))
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn within(self, x: __m512, index: __m512, low: __m512, high: __m512, other: __m512) -> __m512 {
        avx512!({
            let above = _mm512_cmp_ps_mask::<_CMP_LE_OQ>(low, index);
            let seen = _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(above, index, high);
            _mm512_mask_blend_ps(seen, other, x)
        })
    }

    #[inline(always)]
    fn exp2(self, x: __m512) -> __m512 {
        avx512!({
            let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            let f = _mm512_sub_ps(x, n);
            let p = exp2_slope(self, f);
            let p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0));
            // "Not less than" is also true for NaN, which is kept.
            let some = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
            _mm512_maskz_scalef_ps(some, p, n)
        })
    }

    #[inline(always)]
    fn exp2_less_one(self, x: __m512) -> __m512 {
        avx512!({
            let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            let f = _mm512_sub_ps(x, n);
            let p = exp2_slope(self, f);
            let one = _mm512_set1_ps(1.0);
            let power = _mm512_scalef_ps(one, n);
            _mm512_fmadd_ps(_mm512_mul_ps(p, f), power, _mm512_sub_ps(power, one))
        })
    }

    #[inline(always)]
    fn copysign(self, x: __m512, sign: __m512) -> __m512 {
        avx512!({
            // 0xCA selects the first operand where the mask has a bit, and the second elsewhere.
            let (mask, x, sign) = (_mm512_set1_epi32(i32::MIN), _mm512_castps_si512(x), _mm512_castps_si512(sign));
            _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xCA>(mask, sign, x))
        })
    }

    #[inline(always)]
    fn transpose(self, square: &mut [__m512; 16]) {
        avx512!({
            let mut t = *square;
            for i in (0..16).step_by(2) {
                t[i] = _mm512_unpacklo_ps(square[i], square[i + 1]);
                t[i + 1] = _mm512_unpackhi_ps(square[i], square[i + 1]);
            }
            // Now quarter q of vector 4 g + c is column 4 q + c of rows 4 g to 4 g + 3.
            let mut r = t;
            for g in (0..16).step_by(4) {
                let pair = |a: __m512, b: __m512| (_mm512_castps_pd(a), _mm512_castps_pd(b));
                let ((a, b), (c, d)) = (pair(t[g], t[g + 2]), pair(t[g + 1], t[g + 3]));
                r[g] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                r[g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
                r[g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
                r[g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
            }
            for c in 0..4 {
                let even = _mm512_shuffle_f32x4::<0x88>(r[c], r[4 + c]);
                let odd = _mm512_shuffle_f32x4::<0xDD>(r[c], r[4 + c]);
                let even_below = _mm512_shuffle_f32x4::<0x88>(r[8 + c], r[12 + c]);
                let odd_below = _mm512_shuffle_f32x4::<0xDD>(r[8 + c], r[12 + c]);
                square[c] = _mm512_shuffle_f32x4::<0x88>(even, even_below);
                square[8 + c] = _mm512_shuffle_f32x4::<0xDD>(even, even_below);
                square[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd, odd_below);
                square[12 + c] = _mm512_shuffle_f32x4::<0xDD>(odd, odd_below);
            }
        })
    }

    #[inline(always)]
    fn sum(self, x: __m512) -> f32 {
        avx512!(_mm512_reduce_add_ps(x))
    }
}
