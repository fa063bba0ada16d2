//! Vector registers: one trait, for AVX-512, AVX2 and whatever the compiler makes of plain arrays.
//!
//! All methods are `unsafe` because the first two need instructions that the caller must have checked for.

/// Vectors of a query panel: a panel has `PANEL_VECTORS * LANES` queries.
pub(super) const PANEL_VECTORS: usize = 3;

/// A set of vector instructions.
pub(super) trait Simd: Copy + Send + Sync + 'static {
    /// A register of f32.
    type V: Copy;
    /// Elements of a register.
    const LANES: usize;
    /// Queries of a panel.
    const PANEL: usize = PANEL_VECTORS * Self::LANES;
    /// Keys of a panel: rows of the micro kernel for scores and outputs.
    const ROWS: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, x: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The greater; `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The greatest integer-valued float at most half away, and the power of two it stands for: see [`exp2`].
    unsafe fn round(x: Self::V) -> Self::V;
    /// `x * 2^n` for integer-valued `n <= 127`; 0 where `n <= -127`.
    unsafe fn scale(x: Self::V, n: Self::V) -> Self::V;
    /// `x` in lanes `first ..= last` (as floats, may lie outside), `other` elsewhere.
    unsafe fn within(x: Self::V, first: f32, last: f32, other: Self::V) -> Self::V;
}

/// 2^x for x up to 127, with 2^-inf = 0 and NaN kept: x = n + f with |f| <= 1/2, and the series of e^(f ln 2).
#[inline(always)]
pub(super) unsafe fn exp2<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller has checked that the instructions of S exist.
    unsafe {
        let x = S::max(S::splat(-160.0), x);
        let n = S::round(x);
        let f = S::sub(x, n);
        // ln(2)^k / k!
        let mut sum = S::splat(1.525_273_4e-5);
        for c in [1.540_353e-4, 1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265_1e-1, 6.931_472e-1, 1.0] {
            sum = S::fma(sum, f, S::splat(c));
        }
        S::scale(sum, n)
    }
}

/// `acc[r][v] += sum over i of a[i * a_step + r * a_row] * b[i * b_step + v * LANES ..]`, in registers.
#[inline(always)]
pub(super) unsafe fn multiply<S: Simd, const R: usize, const N: usize>(
    steps: usize,
    a: *const f32,
    a_row: usize,
    a_step: usize,
    b: *const f32,
    b_step: usize,
    acc: &mut [[S::V; N]; R],
) {
    // SAFETY: the caller has checked the instructions, and that a and b hold what the formula reads.
    unsafe {
        let mut sums = *acc;
        for i in 0..steps {
            let (a, b) = (a.add(i * a_step), b.add(i * b_step));
            let mut column = [S::splat(0.0); N];
            for (v, column) in column.iter_mut().enumerate() {
                *column = S::load(b.add(v * S::LANES));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = S::splat(*a.add(r * a_row));
                for (sum, column) in sums.iter_mut().zip(column) {
                    *sum = S::fma(x, column, *sum);
                }
            }
        }
        *acc = sums;
    }
}

/// Four-lane arrays: compiles anywhere, and vectorises where there are 128-bit registers.
#[derive(Clone, Copy)]
pub(super) struct Portable;

macro_rules! lanewise {
    ($f:expr, $($x:expr),+) => { std::array::from_fn(|i| $f($($x[i]),+)) };
}

impl Simd for Portable {
    type V = [f32; 4];
    const LANES: usize = 4;
    const ROWS: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        // SAFETY: the caller vouches for four elements; no alignment is assumed.
        unsafe { from.cast::<[f32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: Self::V) {
        // SAFETY: the caller vouches for four elements; no alignment is assumed.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|a: f32, b: f32| a + b, a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|a: f32, b: f32| a - b, a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|a: f32, b: f32| a * b, a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Not mul_add: without the instruction that is a call for each lane.
        lanewise!(|a: f32, b: f32, c: f32| a * b + c, a, b, c)
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|a: f32, b: f32| if a > b { a } else { b }, a, b)
    }
    #[inline(always)]
    unsafe fn round(x: Self::V) -> Self::V {
        // Adding 1.5 * 2^23 leaves no bits behind the point; exact for the |x| <= 160 that reach it.
        lanewise!(|x: f32| (x + 12_582_912.0) - 12_582_912.0, x)
    }
    #[inline(always)]
    unsafe fn scale(x: Self::V, n: Self::V) -> Self::V {
        let one = |x: f32, n: f32| {
            let power = f32::from_bits(((n as i32).saturating_add(127).clamp(0, 254) as u32) << 23);
            x * power
        };
        lanewise!(one, x, n)
    }
    #[inline(always)]
    unsafe fn within(x: Self::V, first: f32, last: f32, other: Self::V) -> Self::V {
        std::array::from_fn(|i| if i as f32 >= first && i as f32 <= last { x[i] } else { other[i] })
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Simd;
    use std::arch::x86_64::*;

    /// 256-bit registers with fused multiply-add.
    #[derive(Clone, Copy)]
    pub(in crate::kernel) struct Avx2;

    /// 512-bit registers.
    #[derive(Clone, Copy)]
    pub(in crate::kernel) struct Avx512;

    macro_rules! intrinsics {
        ($($name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)? = $body:expr;)+) => {
            $(#[inline(always)]
            unsafe fn $name($($arg: $type),*) $(-> $out)? {
                // SAFETY: the caller has checked that the processor has the instructions, and vouches for pointers.
                unsafe { $body }
            })+
        };
    }

    impl Simd for Avx2 {
        type V = __m256;
        const LANES: usize = 8;
        const ROWS: usize = 4;

        intrinsics! {
            splat(x: f32) -> __m256 = _mm256_set1_ps(x);
            load(from: *const f32) -> __m256 = _mm256_loadu_ps(from);
            store(to: *mut f32, x: __m256) = _mm256_storeu_ps(to, x);
            add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
            sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
            mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
            fma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
            max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
            round(x: __m256) -> __m256 = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            scale(x: __m256, n: __m256) -> __m256 = {
                let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                let exponent = _mm256_max_epi32(biased, _mm256_setzero_si256());
                _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
            };
            within(x: __m256, first: f32, last: f32, other: __m256) -> __m256 = {
                let lane = _mm256_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0);
                let after = _mm256_cmp_ps::<_CMP_GE_OQ>(lane, _mm256_set1_ps(first));
                let before = _mm256_cmp_ps::<_CMP_LE_OQ>(lane, _mm256_set1_ps(last));
                _mm256_blendv_ps(other, x, _mm256_and_ps(after, before))
            };
        }
    }

    impl Simd for Avx512 {
        type V = __m512;
        const LANES: usize = 16;
        const ROWS: usize = 8;

        intrinsics! {
            splat(x: f32) -> __m512 = _mm512_set1_ps(x);
            load(from: *const f32) -> __m512 = _mm512_loadu_ps(from);
            store(to: *mut f32, x: __m512) = _mm512_storeu_ps(to, x);
            add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
            sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
            mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
            fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
            max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
            round(x: __m512) -> __m512 =
                _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            scale(x: __m512, n: __m512) -> __m512 = _mm512_scalef_ps(x, n);
            within(x: __m512, first: f32, last: f32, other: __m512) -> __m512 = {
                let lane = _mm512_setr_ps(
                    0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
                );
                let after = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(lane, _mm512_set1_ps(first));
                let before = _mm512_cmp_ps_mask::<_CMP_LE_OQ>(lane, _mm512_set1_ps(last));
                _mm512_mask_blend_ps(after & before, other, x)
            };
        }
    }
}
