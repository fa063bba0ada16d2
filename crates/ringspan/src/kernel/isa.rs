//! Instruction sets, and the blocked kernels compiled for each of them.

use super::backward::{Backward, Sums};
use super::decode::Decode;
use super::forward::Forward;
use super::vector::Portable;
#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512};
use std::ops::Range;

/// An instruction set that the blocked kernels exist for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Whatever the compiler makes of plain Rust.
    Portable,
    /// AVX2 and FMA: 8 lanes.
    Avx2,
    /// AVX-512F: 16 lanes.
    Avx512,
}

impl Isa {
    /// The instruction sets this machine has, the fastest first.
    pub fn available() -> Vec<Isa> {
        #[cfg(target_arch = "x86_64")]
        {
            let wide = Avx512::detect().map(|_| Isa::Avx512).into_iter();
            wide.chain(Avx2::detect().map(|_| Isa::Avx2)).chain([Isa::Portable]).collect()
        }
        #[cfg(not(target_arch = "x86_64"))]
        vec![Isa::Portable]
    }

    /// Queries of a block: three vectors.
    pub(super) fn lanes(self) -> usize {
        3 * self.vector()
    }

    /// Numbers in a vector.
    pub(super) fn vector(self) -> usize {
        match self {
            Isa::Portable => 4,
            Isa::Avx2 => 8,
            Isa::Avx512 => 16,
        }
    }

    /// Keys that the micro kernel takes at once: as many as the registers hold beside three vectors of queries.
    pub(super) fn rows(self) -> usize {
        match self {
            Isa::Avx512 => 8,
            _ => 4,
        }
    }
}

/// A function of the kernels for the instruction set at hand, compiled with its features.
macro_rules! dispatch {
    ($name:ident, $job:ty, $call:ident($($argument:ident: $type:ty),*), $doc:literal) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// As the generic function.
        pub(super) unsafe fn $name(isa: Isa, job: &$job, $($argument: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f")]
                unsafe fn avx512(simd: Avx512, job: &$job, $($argument: $type),*) {
                    // SAFETY: the contract of the caller.
                    unsafe { job.$call::<_, 8, 3>(simd, $($argument),*) }
                }
                #[target_feature(enable = "avx2,fma")]
                unsafe fn avx2(simd: Avx2, job: &$job, $($argument: $type),*) {
                    // SAFETY: the contract of the caller.
                    unsafe { job.$call::<_, 4, 3>(simd, $($argument),*) }
                }
                match (isa, Avx512::detect(), Avx2::detect()) {
                    // SAFETY: the token proves the features; the rest is the contract of the caller.
                    (Isa::Avx512, Some(simd), _) => return unsafe { avx512(simd, job, $($argument),*) },
                    // SAFETY: as above.
                    (Isa::Avx2, _, Some(simd)) => return unsafe { avx2(simd, job, $($argument),*) },
                    _ => (),
                }
            }
            debug_assert_eq!(isa, Isa::Portable);
            // SAFETY: the contract of the caller.
            unsafe { job.$call::<_, 4, 3>(Portable, $($argument),*) }
        }
    };
}

dispatch!(
    forward_block,
    Forward<'_>,
    block(head: usize, block: usize, scratch: &mut [f32]),
    "[`Forward::block`] compiled for `isa`."
);
dispatch!(
    backward_head,
    Backward<'_>,
    head(head: usize, blocks: Range<usize>, sums: Sums, scratch: &mut [f32]),
    "[`Backward::head`] compiled for `isa`."
);
dispatch!(
    decode_chunk,
    Decode<'_>,
    chunk(kv: usize, rows: Range<usize>, states: &mut [f32], scores: &mut [f32]),
    "[`Decode::chunk`] compiled for `isa`."
);
