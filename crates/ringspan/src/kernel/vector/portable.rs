//! Vectors as arrays, for any machine; the compiler turns loops over them into vector instructions.

use super::{EXP2, LeftOperand, RightOperand, Simd, multiply};
use half::bf16;
use std::hint::black_box;

/// Number of vectors of columns in a product of four rows. On x86-64 it is 2: without fused operations each product needs a register
/// before it is added, and 3 vectors would need more than the 16 registers. Other processors have fused operations, or 32 registers.
pub(crate) const PORTABLE_COLUMNS: usize = if cfg!(target_arch = "x86_64") { 2 } else { 3 };

/// The token for any machine, with N numbers in a vector: 4, or 8 if the code is compiled for wider vectors than the
/// architecture's minimum.
#[derive(Clone, Copy)]
pub(crate) struct Portable<const N: usize>;

#[inline(always)]
fn each<const N: usize>(f: impl Fn(usize) -> f32) -> [f32; N] {
    std::array::from_fn(f)
}

/// `2^f - 1` and `2^n`, where n is the integer nearest to x, and `f = x - n`.
#[inline(always)]
fn parts(x: f32) -> (f32, f32) {
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, which is then in the low bits of `shifted`.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x + ROUND;
    let f = x - (shifted - ROUND);
    let mut p = EXP2[0];
    for c in &EXP2[1..] {
        p = p * f + c;
    }
    (p * f, f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits())))
}

impl<const N: usize> Simd for Portable<N> {
    type V = [f32; N];
    const LANES: usize = N;
    const COLUMNS: usize = PORTABLE_COLUMNS;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; N]
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::V {
        // SAFETY: the caller gives N readable numbers; arrays of f32 need no more alignment than f32.
        unsafe { from.cast::<[f32; N]>().read() }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> Self::V {
        // SAFETY: the caller gives N readable numbers; arrays of bf16 need no more alignment than bf16.
        let from = unsafe { from.cast::<[bf16; N]>().read() };
        each(|i| f32::from_bits(u32::from(from[i].to_bits()) << 16))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: Self::V) {
        // SAFETY: the caller gives N writable numbers; arrays of f32 need no more alignment than f32.
        unsafe { to.cast::<[f32; N]>().write(x) }
    }

    #[inline(always)]
    unsafe fn store_halves(self, first: *mut f32, second: *mut f32, x: Self::V) {
        // SAFETY: the caller gives N / 2 writable numbers each.
        unsafe {
            first.copy_from_nonoverlapping(x.as_ptr(), N / 2);
            second.copy_from_nonoverlapping(x.as_ptr().add(N / 2), N / 2);
        }
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // If the target has no fused operation, `mul_add` would call a function of the C library.
        if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
            each(|i| a[i].mul_add(b[i], c[i]))
        } else {
            each(|i| a[i] * b[i] + c[i])
        }
    }

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn within(self, x: Self::V, index: Self::V, low: Self::V, high: Self::V, other: Self::V) -> Self::V {
        each(|i| if low[i] <= index[i] && index[i] < high[i] { x[i] } else { other[i] })
    }

    #[inline(always)]
    fn exp2(self, x: Self::V) -> Self::V {
        each(|i| {
            let (part, power) = parts(x[i]);
            if x[i] < -126.0 { 0.0 } else { (part + 1.0) * power }
        })
    }

    #[inline(always)]
    fn exp2_less_one(self, x: Self::V) -> Self::V {
        each(|i| {
            let (part, power) = parts(x[i]);
            part * power + (power - 1.0)
        })
    }

    #[inline(always)]
    fn copysign(self, x: Self::V, sign: Self::V) -> Self::V {
        each(|i| x[i].copysign(sign[i]))
    }

    #[inline(always)]
    fn transpose(self, square: &mut [Self::V; 16]) {
        let from = *square;
        for (i, to) in square.iter_mut().enumerate().take(N) {
            *to = each(|j| from[j][i]);
        }
    }

    #[inline(always)]
    fn sum(self, x: Self::V) -> f32 {
        let mut x = x;
        let mut left = N / 2;
        while left > 0 {
            for i in 0..left {
                x[i] += x[i + left];
            }
            left /= 2;
        }
        x[0]
    }

    #[inline(always)]
    unsafe fn multiply<const R: usize, const V: usize>(
        self,
        depth: usize,
        a: LeftOperand,
        b: RightOperand,
        sums: [[Self::V; V]; R],
    ) -> [[Self::V; V]; R] {
        // `black_box` separates the loop from the code after it: compiled together, it used vectors that mix the numbers of
        // lanes.
        // SAFETY: the contract of the caller.
        black_box(unsafe { multiply(self, depth, a, b, sums) })
    }
}
