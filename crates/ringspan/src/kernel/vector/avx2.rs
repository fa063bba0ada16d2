//! Vectors of 8 f32.

use super::{Simd, exp2_slope};
use std::arch::x86_64::*;

/// A machine with AVX2 and FMA; only [`Avx2::detect`] makes one.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// The token, if this machine has the instructions.
    pub(crate) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }
}

/// An intrinsic that needs AVX2 or FMA and nothing else.
macro_rules! avx2 {
    ($call:expr) => {{
        // SAFETY: a token exists only on machines with AVX2 and FMA.
        unsafe { $call }
    }};
}

impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const COLUMNS: usize = 3;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        avx2!(_mm256_set1_ps(x))
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        avx2!(_mm256_loadu_ps(from))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: __m256) {
        avx2!(_mm256_storeu_ps(to, x))
    }

    #[inline(always)]
    unsafe fn store_halves(self, first: *mut f32, second: *mut f32, x: __m256) {
        avx2!({
            _mm_storeu_ps(first, _mm256_castps256_ps128(x));
            _mm_storeu_ps(second, _mm256_extractf128_ps::<1>(x));
        })
    }

    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        avx2!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn within(self, x: __m256, index: __m256, low: __m256, high: __m256, other: __m256) -> __m256 {
        avx2!({
            let above = _mm256_cmp_ps::<_CMP_LE_OQ>(low, index);
            let below = _mm256_cmp_ps::<_CMP_LT_OQ>(index, high);
            _mm256_blendv_ps(other, x, _mm256_and_ps(above, below))
        })
    }

    #[inline(always)]
    fn exp2(self, x: __m256) -> __m256 {
        avx2!({
            let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            let f = _mm256_sub_ps(x, n);
            let p = exp2_slope(self, f);
            let p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0));
            let bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            let power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(bits));
            // "Not less than" keeps NaN visible; what n is below -126 does not matter.
            let some = _mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(-126.0));
            _mm256_and_ps(some, _mm256_mul_ps(p, power))
        })
    }

    #[inline(always)]
    fn exp2_less_one(self, x: __m256) -> __m256 {
        avx2!({
            let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            let f = _mm256_sub_ps(x, n);
            let p = exp2_slope(self, f);
            let bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            let power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(bits));
            _mm256_fmadd_ps(_mm256_mul_ps(p, f), power, _mm256_sub_ps(power, _mm256_set1_ps(1.0)))
        })
    }

    #[inline(always)]
    fn copysign(self, x: __m256, sign: __m256) -> __m256 {
        avx2!({
            let mask = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_andnot_ps(mask, x), _mm256_and_ps(mask, sign))
        })
    }

    #[inline(always)]
    fn transpose(self, square: &mut [__m256; 16]) {
        avx2!({
            let mut t = *square;
            for i in (0..8).step_by(2) {
                t[i] = _mm256_unpacklo_ps(square[i], square[i + 1]);
                t[i + 1] = _mm256_unpackhi_ps(square[i], square[i + 1]);
            }
            // Half h of vector 4 g + c is then column 4 h + c of rows 4 g to 4 g + 3.
            let mut r = t;
            for g in [0, 4] {
                let pair = |a: __m256, b: __m256| (_mm256_castps_pd(a), _mm256_castps_pd(b));
                let ((a, b), (c, d)) = (pair(t[g], t[g + 2]), pair(t[g + 1], t[g + 3]));
                r[g] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
                r[g + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
                r[g + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(c, d));
                r[g + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(c, d));
            }
            for c in 0..4 {
                square[c] = _mm256_permute2f128_ps::<0x20>(r[c], r[4 + c]);
                square[4 + c] = _mm256_permute2f128_ps::<0x31>(r[c], r[4 + c]);
            }
        })
    }

    #[inline(always)]
    fn sum(self, x: __m256) -> f32 {
        avx2!({
            let half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)))
        })
    }
}
