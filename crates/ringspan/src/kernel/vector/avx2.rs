//! Vectors of 8 f32 with AVX2.

use super::{LeftOperand, RightOperand, Simd, exp2_slope};
use half::bf16;
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::transmute_copy;

/// A token for machines with AVX2 and FMA; only [`Avx2::detect`] makes one.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// Returns the token, if this machine has the instructions.
    pub(crate) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }
}

/// Calls an intrinsic that needs AVX2 or FMA and nothing else.
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
    unsafe fn load_bf16(self, from: *const bf16) -> __m256 {
        avx2!({
            let numbers = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(numbers))
        })
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
            // "Not less than" is also true for NaN, which is kept; values of n below -126 do not matter.
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
            // Now half h of vector 4 g + c is column 4 h + c of rows 4 g to 4 g + 3.
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

    #[inline(always)]
    unsafe fn multiply<const R: usize, const V: usize>(
        self,
        depth: usize,
        a: LeftOperand,
        b: RightOperand,
        sums: [[__m256; V]; R],
    ) -> [[__m256; V]; R] {
        if (R, V) != (4, 3) {
            // SAFETY: the contract of the caller.
            return unsafe { super::multiply(self, depth, a, b, sums) };
        }
        // SAFETY: R is 4 and V is 3, so both types are the same array; the rest is the contract of the caller.
        unsafe { transmute_copy(&multiply_4x3(depth, a, b, transmute_copy(&sums))) }
    }
}

/// The instructions for one term of the sums of [`multiply_4x3`]: the vectors of columns are at `$b`.
macro_rules! term_4x3 {
    ($b:literal) => {
        concat!(
            "vmovups {b0}, [",
            $b,
            "]\n",
            "vmovups {b1}, [",
            $b,
            " + 32]\n",
            "vmovups {b2}, [",
            $b,
            " + 64]\n",
            "vbroadcastss {x}, [{a}]\n",
            "vfmadd231ps {s00}, {b0}, {x}\n",
            "vfmadd231ps {s01}, {b1}, {x}\n",
            "vfmadd231ps {s02}, {b2}, {x}\n",
            "vbroadcastss {x}, [{a} + {row}]\n",
            "vfmadd231ps {s10}, {b0}, {x}\n",
            "vfmadd231ps {s11}, {b1}, {x}\n",
            "vfmadd231ps {s12}, {b2}, {x}\n",
            "vbroadcastss {x}, [{a} + 2 * {row}]\n",
            "vfmadd231ps {s20}, {b0}, {x}\n",
            "vfmadd231ps {s21}, {b1}, {x}\n",
            "vfmadd231ps {s22}, {b2}, {x}\n",
            "vbroadcastss {x}, [{a} + {row_3}]\n",
            "add {a}, {a_step}\n",
            "vfmadd231ps {s30}, {b0}, {x}\n",
            "vfmadd231ps {s31}, {b1}, {x}\n",
            "vfmadd231ps {s32}, {b2}, {x}\n",
        )
    };
}

/// Does [`Simd::multiply`] for four rows and three vectors of columns.
///
/// Twelve sums, three columns and a row take all sixteen registers. The compiler loads rows early, which needs one register
/// more: it kept one of the sums in memory, and waiting for that sum halved the speed of all kernels.
///
/// The loop is unrolled to four terms. With one term a turn, its instructions take all that a core can start while it multiplies, if the
/// core's other hardware thread is busy; four terms need fewer instructions each, and are 5 to 8% faster then.
///
/// # Safety
/// As for [`Simd::multiply`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn multiply_4x3(depth: usize, a: LeftOperand, b: RightOperand, sums: [[__m256; 3]; 4]) -> [[__m256; 3]; 4] {
    let [
        [mut s00, mut s01, mut s02],
        [mut s10, mut s11, mut s12],
        [mut s20, mut s21, mut s22],
        [mut s30, mut s31, mut s32],
    ] = sums;
    // SAFETY: it reads memory that the caller made readable, and writes registers only.
    unsafe {
        asm!(
            "test {fours}, {fours}",
            "jz 3f",
            ".p2align 5",
            "2:",
            term_4x3!("{b}"),
            term_4x3!("{b} + {b_step}"),
            term_4x3!("{b} + 2 * {b_step}"),
            term_4x3!("{b} + {b_step_3}"),
            "lea {b}, [{b} + 4 * {b_step}]",
            "dec {fours}",
            "jnz 2b",
            "3:",
            "test {rest}, {rest}",
            "jz 5f",
            "4:",
            term_4x3!("{b}"),
            "add {b}, {b_step}",
            "dec {rest}",
            "jnz 4b",
            "5:",
            a = inout(reg) a.data => _,
            b = inout(reg) b.data => _,
            fours = inout(reg) depth / 4 => _,
            rest = inout(reg) depth % 4 => _,
            row = in(reg) 4 * a.row,
            row_3 = in(reg) 12 * a.row,
            a_step = in(reg) 4 * a.step,
            b_step = in(reg) 4 * b.step,
            b_step_3 = in(reg) 12 * b.step,
            b0 = out(ymm_reg) _,
            b1 = out(ymm_reg) _,
            b2 = out(ymm_reg) _,
            x = out(ymm_reg) _,
            s00 = inout(ymm_reg) s00,
            s01 = inout(ymm_reg) s01,
            s02 = inout(ymm_reg) s02,
            s10 = inout(ymm_reg) s10,
            s11 = inout(ymm_reg) s11,
            s12 = inout(ymm_reg) s12,
            s20 = inout(ymm_reg) s20,
            s21 = inout(ymm_reg) s21,
            s22 = inout(ymm_reg) s22,
            s30 = inout(ymm_reg) s30,
            s31 = inout(ymm_reg) s31,
            s32 = inout(ymm_reg) s32,
            options(nostack, readonly),
        );
    }
    [[s00, s01, s02], [s10, s11, s12], [s20, s21, s22], [s30, s31, s32]]
}
