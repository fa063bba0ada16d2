//! Compiles a function of the blocked kernels for every instruction set, and calls the one that suits the machine.

/// Defines a function that calls a kernel function compiled for the instruction set in `features`. The lists are its constants
/// for AVX-512, for AVX2, and for portable code.
macro_rules! dispatch {
    (
        $name:ident, $job:ty,
        $call:ident<[$($wide:literal),*], [$($narrow:literal),*], [$($portable:expr),*]>
        ($($argument:ident: $type:ty),*), $doc:literal
    ) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// As for the generic function.
        pub(super) unsafe fn $name(features: $crate::kernel::isa::TargetFeatures, job: &$job, $($argument: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f")]
                unsafe fn avx512(simd: $crate::kernel::vector::Avx512<false>, job: &$job, $($argument: $type),*) {
                    // SAFETY: the contract of the caller.
                    unsafe { job.$call::<_, $($wide),*>(simd, $($argument),*) }
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
                unsafe fn avx512_pairs(simd: $crate::kernel::vector::Avx512<true>, job: &$job, $($argument: $type),*) {
                    // SAFETY: the contract of the caller.
                    unsafe { job.$call::<_, $($wide),*>(simd, $($argument),*) }
                }
                #[target_feature(enable = "avx2,fma")]
                unsafe fn avx2(simd: $crate::kernel::vector::Avx2, job: &$job, $($argument: $type),*) {
                    // SAFETY: the contract of the caller.
                    unsafe { job.$call::<_, $($narrow),*>(simd, $($argument),*) }
                }
                #[target_feature(enable = "avx")]
                unsafe fn avx(job: &$job, $($argument: $type),*) {
                    // SAFETY: the contract of the caller.
                    unsafe { job.$call::<_, $({ $portable }),*>($crate::kernel::vector::Portable::<8>, $($argument),*) }
                }
                match features.isa {
                    $crate::kernel::Isa::Avx512 if features.pairs => {
                        if let Some(simd) = $crate::kernel::vector::Avx512::detect() {
                            // SAFETY: the token proves the features; the rest is the contract of the caller.
                            return unsafe { avx512_pairs(simd, job, $($argument),*) };
                        }
                    }
                    $crate::kernel::Isa::Avx512 => {
                        if let Some(simd) = $crate::kernel::vector::Avx512::detect() {
                            // SAFETY: as above.
                            return unsafe { avx512(simd, job, $($argument),*) };
                        }
                    }
                    $crate::kernel::Isa::Avx2 => {
                        if let Some(simd) = $crate::kernel::vector::Avx2::detect() {
                            // SAFETY: as above.
                            return unsafe { avx2(simd, job, $($argument),*) };
                        }
                    }
                    // SAFETY: the machine has AVX; the rest is the contract of the caller.
                    $crate::kernel::Isa::Portable if features.avx => return unsafe { avx(job, $($argument),*) },
                    $crate::kernel::Isa::Portable => (),
                }
            }
            debug_assert_eq!(features.isa, $crate::kernel::Isa::Portable);
            // SAFETY: the contract of the caller.
            unsafe { job.$call::<_, $({ $portable }),*>($crate::kernel::vector::Portable::<4>, $($argument),*) }
        }
    };
}

pub(super) use dispatch;
