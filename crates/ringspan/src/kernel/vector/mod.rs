//! Vectors of f32, implemented for each instruction set; the blocked kernels are written once over this trait.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
pub(super) use portable::{PORTABLE_COLUMNS, Portable};

use half::bf16;

/// A token that proves that the machine has an instruction set, with its operations on vectors of f32.
///
/// Every method is `inline(always)`, because it must be inlined into a function with the matching `target_feature`.
pub(super) trait Simd: Copy {
    /// A vector of `LANES` numbers.
    type V: Copy;
    /// Number of elements in a vector.
    const LANES: usize;
    /// Number of vectors of columns that a product of four rows takes at once, limited by the registers.
    const COLUMNS: usize;
    /// Number of terms of a sum that a lane of [`product`](Self::product) takes: 1, or 2 in bf16.
    const PAIR: usize = 1;

    /// A vector with `x` in all lanes.
    fn splat(self, x: f32) -> Self::V;
    /// Reads `LANES` numbers.
    ///
    /// # Safety
    /// `from` must be readable for `LANES` numbers.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// Reads `LANES` numbers of bf16.
    ///
    /// # Safety
    /// `from` must be readable for `LANES` numbers.
    unsafe fn load_bf16(self, from: *const bf16) -> Self::V;
    /// Writes `LANES` numbers.
    ///
    /// # Safety
    /// `to` must be writable for `LANES` numbers.
    unsafe fn store(self, to: *mut f32, x: Self::V);
    /// Writes the first and the second half of a vector to separate places.
    ///
    /// # Safety
    /// Both must be writable for `LANES / 2` numbers.
    unsafe fn store_halves(self, first: *mut f32, second: *mut f32, x: Self::V);
    /// `a * b + c`
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a * b + c`; if PAIR is 2, with `a` and `b` of pairs: `a0 * b0 + a1 * b1 + c`.
    #[inline(always)]
    fn product(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        self.fma(a, b, c)
    }
    /// Rounds two vectors to bf16, and pairs the numbers of the same lane. If PAIR is 1, returns `first`.
    #[inline(always)]
    fn pair(self, first: Self::V, _second: Self::V) -> Self::V {
        first
    }
    /// Rounds two vectors to bf16, and pairs neighbours of `first`, then of `second`. If PAIR is 1, returns `first`.
    #[inline(always)]
    fn pair_along(self, first: Self::V, _second: Self::V) -> Self::V {
        first
    }
    /// Loads LANES numbers of two rows of bf16, and pairs the numbers of the same lane; only if PAIR is 2.
    ///
    /// # Safety
    /// Both must be readable for LANES numbers.
    #[inline(always)]
    unsafe fn load_pairs(self, _first: *const bf16, _second: *const bf16) -> Self::V {
        self.splat(0.0)
    }
    /// `a + b`
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// The larger of two numbers; if one is NaN, the second.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `x` in the lanes with `low <= index < high`, `other` in the rest.
    fn within(self, x: Self::V, index: Self::V, low: Self::V, high: Self::V, other: Self::V) -> Self::V;
    /// `2^x` with a relative error of about 1e-7 for `x < 127`; exactly 0 below -126, including -inf.
    fn exp2(self, x: Self::V) -> Self::V;
    /// `2^x - 1` for `x <= 0`, with the same relative error near 0 as elsewhere.
    fn exp2_less_one(self, x: Self::V) -> Self::V;
    /// `x` with the signs of `sign`.
    fn copysign(self, x: Self::V, sign: Self::V) -> Self::V;
    /// Transposes the first `LANES` vectors as a square.
    fn transpose(self, square: &mut [Self::V; 16]);
    /// The sum of the lanes.
    fn sum(self, x: Self::V) -> f32;
    /// The sums of the lanes of the first `LANES` vectors, as one vector.
    #[inline(always)]
    fn sums(self, mut square: [Self::V; 16]) -> Self::V {
        self.transpose(&mut square);
        let mut left = Self::LANES / 2;
        while left > 0 {
            for i in 0..left {
                square[i] = self.add(square[i], square[i + left]);
            }
            left /= 2;
        }
        square[0]
    }
    /// Adds a small matrix product, of R rows of `a` and V vectors of columns of `b`, to `sums`: `sums[i][v] += a[i * a.row
    /// + t * a.step] * b[t * b.step + v * LANES ..][..LANES]` for all t below `depth`, in ascending order of t.
    ///
    /// # Safety
    /// `a` must be readable at every `i * a.row + t * a.step` with i < R and t < depth, and `b` for `V * LANES` numbers at
    /// every `t * b.step`.
    #[inline(always)]
    unsafe fn multiply<const R: usize, const V: usize>(
        self,
        depth: usize,
        a: LeftOperand,
        b: RightOperand,
        sums: [[Self::V; V]; R],
    ) -> [[Self::V; V]; R] {
        // SAFETY: the contract of the caller.
        unsafe { multiply(self, depth, a, b, sums) }
    }
}

/// The left operand of a product: numbers, or pairs of bf16, that are broadcast.
#[derive(Clone, Copy)]
pub(super) struct LeftOperand {
    pub(super) data: *const f32,
    /// Elements from one row to the next.
    pub(super) row: usize,
    /// Elements from one term of the sums to the next.
    pub(super) step: usize,
}

/// The right operand of a product: vectors of columns, of numbers or pairs of bf16.
#[derive(Clone, Copy)]
pub(super) struct RightOperand {
    pub(super) data: *const f32,
    /// Elements from one term of the sums to the next.
    pub(super) step: usize,
}

/// The generic implementation of [`Simd::multiply`], in plain Rust.
///
/// # Safety
/// As for [`Simd::multiply`].
#[inline(always)]
unsafe fn multiply<S: Simd, const R: usize, const V: usize>(
    simd: S,
    depth: usize,
    mut a: LeftOperand,
    mut b: RightOperand,
    mut sums: [[S::V; V]; R],
) -> [[S::V; V]; R] {
    for _ in 0..depth {
        let mut columns = [simd.splat(0.0); V];
        for (v, x) in columns.iter_mut().enumerate() {
            // SAFETY: the caller made b readable here.
            *x = unsafe { simd.load(b.data.add(v * S::LANES)) };
        }
        for (i, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller made a readable here.
            let x = simd.splat(unsafe { *a.data.add(i * a.row) });
            for v in 0..V {
                sums[v] = simd.product(x, columns[v], sums[v]);
            }
        }
        a.data = a.data.wrapping_add(a.step);
        b.data = b.data.wrapping_add(b.step);
    }
    sums
}

/// Prefetches the cache lines of some elements, on processors that have an instruction for it.
#[inline(always)]
pub fn prefetch<T>(elements: &[T]) {
    prefetch_bytes(elements.as_ptr(), size_of_val(elements));
}

/// Prefetches the cache lines that an element at this address has; any address will do, since nothing is read.
#[inline(always)]
pub fn prefetch_at<T>(address: *const T) {
    prefetch_bytes(address, size_of::<T>());
}

#[inline(always)]
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "nothing to ask"))]
fn prefetch_bytes<T>(first: *const T, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..bytes).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is part of the architecture, and a prefetch reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(first.cast::<i8>().wrapping_add(offset)) };
    }
}

/// Like [`prefetch`], for elements that are needed later: they are brought to the L2 cache only.
#[inline(always)]
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "nothing to ask"))]
pub(super) fn prefetch_far<T>(elements: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in elements.chunks(64 / size_of::<T>()) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: SSE is part of the architecture, and a prefetch reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
    }
}

/// Prefetches the cache line of an address into the L2 cache; any address will do, since nothing is read.
#[inline(always)]
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "nothing to ask"))]
pub(super) fn prefetch_line<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: SSE is part of the architecture, and a prefetch reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }
}

/// `e^x` for `x <= 0`, with a relative error of 2e-7 near 0 up to 2e-6 at small results; exactly 0 below -87.4, including
/// -inf.
#[inline(always)]
pub(super) fn exp<S: Simd>(simd: S, x: S::V) -> S::V {
    simd.exp2(simd.mul(x, simd.splat(std::f32::consts::LOG2_E)))
}

/// `tanh x` with a relative error of about 2e-7: `-t / (2 + t)` with `t = exp(-2|x|) - 1`.
#[inline(always)]
pub(super) fn tanh<S: Simd>(simd: S, x: S::V) -> S::V {
    let size = simd.max(x, simd.sub(simd.splat(0.0), x));
    // For large |x|, t is -1. The lower bound keeps 2^n a normal number, and keeps NaN.
    let power = simd.max(simd.splat(-60.0), simd.mul(size, simd.splat(-2.0 * std::f32::consts::LOG2_E)));
    let t = simd.exp2_less_one(power);
    simd.copysign(simd.div(t, simd.add(t, simd.splat(2.0))), x)
}

/// `(2^f - 1) / f` for `|f| <= 1/2`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn exp2_slope<S: Simd>(simd: S, f: S::V) -> S::V {
    EXP2[1..].iter().fold(simd.splat(EXP2[0]), |p, &c| simd.fma(p, f, simd.splat(c)))
}

/// Coefficients of `(2^f - 1) / f` on [-1/2, 1/2], highest power first (Cephes library, exp2f).
const EXP2: [f32; 6] = [1.535_336_2e-4, 1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, 6.931_472e-1];

#[cfg(test)]
mod tests {
    use super::*;

    fn exp2_of<S: Simd>(simd: S, x: f32) -> f32 {
        let mut to = [0.0; 16];
        // SAFETY: no vector is longer than 16 numbers.
        unsafe { simd.store(to.as_mut_ptr(), simd.exp2(simd.splat(x))) };
        to[0]
    }

    fn check<S: Simd>(simd: S) {
        for step in -12_600..1_200 {
            let x = step as f32 / 100.0;
            let wanted = f64::from(x).exp2();
            let error = (f64::from(exp2_of(simd, x)) - wanted).abs() / wanted;
            assert!(error < 2e-7, "2^{x} is wrong by {error:e}");
        }
        for x in [-126.01, -1e5, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(exp2_of(simd, x), 0.0, "2^{x}");
        }
        for step in 1..2_000 {
            for x in [step as f32 / 100.0, step as f32 / 1e4, step as f32 * -1e-9, step as f32 * 1e25] {
                let mut to = [0.0; 16];
                // SAFETY: no vector is longer than 16 numbers.
                unsafe { simd.store(to.as_mut_ptr(), tanh(simd, simd.splat(x))) };
                let error = (f64::from(to[0]) / f64::from(x).tanh() - 1.0).abs();
                assert!(error < 2.5e-7, "tanh({x}) is {}, wrong by {error:e}", to[0]);
            }
        }
        assert_eq!(exp2_of(simd, 0.0), 1.0);
        assert!(exp2_of(simd, f32::NAN).is_nan());
        let numbers: Vec<f32> = (0..16).map(|x| x as f32).collect();
        // SAFETY: no vector is longer than 16 numbers.
        let (x, mut to) = (unsafe { simd.load(numbers.as_ptr()) }, [0.0; 16]);
        assert_eq!(simd.sum(x), numbers[..S::LANES].iter().sum::<f32>());
        let mut square = [x; 16];
        square.iter_mut().enumerate().for_each(|(i, x)| *x = simd.add(*x, simd.splat(100.0 * i as f32)));
        simd.transpose(&mut square);
        for (i, x) in square.iter().enumerate().take(S::LANES) {
            // SAFETY: no vector is longer than 16 numbers.
            unsafe { simd.store(to.as_mut_ptr(), *x) };
            for (j, x) in to.iter().enumerate().take(S::LANES) {
                assert_eq!(*x, (100 * j + i) as f32);
            }
        }
        let mut halves = [[-1.0; 10]; 2];
        let [first, second] = &mut halves;
        // SAFETY: a half has at most 8 numbers.
        unsafe { simd.store_halves(first[1..].as_mut_ptr(), second[2..].as_mut_ptr(), x) };
        let half = S::LANES / 2;
        assert_eq!((&halves[0][1..1 + half], halves[0][1 + half]), (&numbers[..half], -1.0));
        assert_eq!((&halves[1][2..2 + half], halves[1][1]), (&numbers[half..2 * half], -1.0));
        let kept = simd.within(x, simd.splat(5.0), x, simd.splat(6.0), simd.splat(f32::NEG_INFINITY));
        // SAFETY: no vector is longer than 16 numbers.
        unsafe { simd.store(to.as_mut_ptr(), kept) };
        for (lane, x) in to[..S::LANES].iter().enumerate() {
            assert_eq!(*x, if lane <= 5 { lane as f32 } else { f32::NEG_INFINITY });
        }
    }

    #[test]
    fn every_instruction_set_of_this_machine_computes_alike() {
        check(Portable::<4>);
        check(Portable::<8>);
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,fma")]
            fn avx2(simd: Avx2) {
                check(simd);
            }
            #[target_feature(enable = "avx512f")]
            fn avx512(simd: Avx512<false>) {
                check(simd);
            }
            #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
            fn pairs(simd: Avx512<true>) {
                check(simd);
                let numbers: Vec<f32> = (0..16).map(|x| x as f32).collect();
                let mut to = [0.0; 16];
                // SAFETY: no vector is longer than 16 numbers.
                unsafe {
                    let x = simd.load(numbers.as_ptr());
                    // Each lane is x * x + 3 * 10.
                    let (a, b) = (simd.pair(x, simd.splat(3.0)), simd.pair(x, simd.splat(10.0)));
                    simd.store(to.as_mut_ptr(), simd.product(a, b, simd.splat(0.5)));
                }
                assert!(to.iter().zip(&numbers).all(|(to, x)| *to == x * x + 30.5));
                // SAFETY: as above.
                unsafe {
                    let x = simd.load(numbers.as_ptr());
                    // The lanes hold (0, 1), (2, 3), .. and then twos.
                    let a = simd.pair_along(x, simd.splat(2.0));
                    let b = simd.pair(simd.splat(1.0), simd.splat(100.0));
                    simd.store(to.as_mut_ptr(), simd.product(a, b, simd.splat(0.0)));
                }
                assert_eq!((to[0], to[3], to[8], to[15]), (100.0, 706.0, 202.0, 202.0));
            }
            if let Some(simd) = Avx2::detect() {
                // SAFETY: the token proves the feature.
                unsafe { avx2(simd) };
            }
            if let Some(simd) = Avx512::<false>::detect() {
                // SAFETY: the token proves the feature.
                unsafe { avx512(simd) };
            }
            if let Some(simd) = Avx512::<true>::detect() {
                // SAFETY: the token proves the features.
                unsafe { pairs(simd) };
            }
        }
    }
}
