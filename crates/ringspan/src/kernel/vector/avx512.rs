//! Vectors of 16 f32.

use super::{EXP2, Simd};
use std::arch::x86_64::*;

/// A machine with AVX-512F; only [`Avx512::detect`] makes one.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// The token, if this machine has the instructions.
    pub(crate) fn detect() -> Option<Self> {
        is_x86_feature_detected!("avx512f").then_some(Self(()))
    }
}

/// An intrinsic that needs AVX-512F and nothing else.
macro_rules! avx512 {
    ($call:expr) => {{
        // SAFETY: a token exists only on machines with AVX-512F.
        unsafe { $call }
    }};
}

impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const COLUMNS: usize = 4;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        avx512!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        avx512!(_mm512_loadu_ps(from))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: __m512) {
        avx512!(_mm512_storeu_ps(to, x))
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        avx512!(_mm512_fmadd_ps(a, b, c))
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
    fn max(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn within(self, x: __m512, index: __m512, low: __m512, high: __m512) -> __m512 {
        avx512!({
            let above = _mm512_cmp_ps_mask::<_CMP_LE_OQ>(low, index);
            let seen = _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(above, index, high);
            _mm512_mask_blend_ps(seen, _mm512_set1_ps(f32::NEG_INFINITY), x)
        })
    }

    #[inline(always)]
    fn exp2(self, x: __m512) -> __m512 {
        avx512!({
            let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            let f = _mm512_sub_ps(x, n);
            let mut p = _mm512_set1_ps(EXP2[0]);
            for c in &EXP2[1..] {
                p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(*c));
            }
            p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0));
            // "Not less than" keeps NaN visible.
            let some = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
            _mm512_maskz_scalef_ps(some, p, n)
        })
    }

    #[inline(always)]
    fn sum(self, x: __m512) -> f32 {
        avx512!(_mm512_reduce_add_ps(x))
    }
}
