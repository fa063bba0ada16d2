//! Vectors of f32 for one instruction set each; the blocked kernels are written once over this trait.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
pub(super) use portable::Portable;

/// A token that stands for an instruction set the machine has, and its operations on vectors of f32.
///
/// Every method is `inline(always)`: it has to end up inside a function with the matching `target_feature`.
pub(super) trait Simd: Copy {
    /// `LANES` numbers.
    type V: Copy;
    /// Numbers in a vector.
    const LANES: usize;
    /// Vectors of columns that a product of four rows takes at once: what the registers hold.
    const COLUMNS: usize;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Reads `LANES` numbers.
    ///
    /// # Safety
    /// `from` must be readable for `LANES` numbers.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// Writes `LANES` numbers.
    ///
    /// # Safety
    /// `to` must be writable for `LANES` numbers.
    unsafe fn store(self, to: *mut f32, x: Self::V);
    /// `a * b + c`
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a + b`
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// The greater of two numbers.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `x` in the lanes where `low <= index < high`, -inf elsewhere.
    fn within(self, x: Self::V, index: Self::V, low: Self::V, high: Self::V) -> Self::V;
    /// `2^x` to about 1e-7 for `x < 127`; exactly 0 below -126, so also for -inf.
    fn exp2(self, x: Self::V) -> Self::V;
    /// The sum of the lanes.
    fn sum(self, x: Self::V) -> f32;
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
        assert_eq!(exp2_of(simd, 0.0), 1.0);
        assert!(exp2_of(simd, f32::NAN).is_nan());
        let numbers: Vec<f32> = (0..16).map(|x| x as f32).collect();
        // SAFETY: no vector is longer than 16 numbers.
        let (x, mut to) = (unsafe { simd.load(numbers.as_ptr()) }, [0.0; 16]);
        assert_eq!(simd.sum(x), numbers[..S::LANES].iter().sum::<f32>());
        let kept = simd.within(x, simd.splat(5.0), x, simd.splat(6.0));
        // SAFETY: no vector is longer than 16 numbers.
        unsafe { simd.store(to.as_mut_ptr(), kept) };
        for (lane, x) in to[..S::LANES].iter().enumerate() {
            assert_eq!(*x, if lane <= 5 { lane as f32 } else { f32::NEG_INFINITY });
        }
    }

    #[test]
    fn every_instruction_set_of_this_machine_computes_alike() {
        check(Portable);
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,fma")]
            fn avx2(simd: Avx2) {
                check(simd);
            }
            #[target_feature(enable = "avx512f")]
            fn avx512(simd: Avx512) {
                check(simd);
            }
            if let Some(simd) = Avx2::detect() {
                // SAFETY: the token proves the feature.
                unsafe { avx2(simd) };
            }
            if let Some(simd) = Avx512::detect() {
                // SAFETY: the token proves the feature.
                unsafe { avx512(simd) };
            }
        }
    }
}
