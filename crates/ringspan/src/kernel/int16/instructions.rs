//! The instruction sets that multiply pairs of 16-bit integers.

#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512, Vnni};
use super::lanes::{Lanes, Portable};
use crate::kernel::Isa;
use std::fmt::{Display, Formatter};

/// An instruction set that this machine has, with which pairs of 16-bit integers are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instructions(IntegerIsa);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IntegerIsa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Vnni,
}

impl Instructions {
    /// All that this machine has, fastest first.
    pub fn available() -> Vec<Self> {
        let mut available = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let wide = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
            if wide && is_x86_feature_detected!("avx512vnni") {
                available.push(Self(IntegerIsa::Vnni));
            }
            if wide {
                available.push(Self(IntegerIsa::Avx512));
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                available.push(Self(IntegerIsa::Avx2));
            }
        }
        available.push(Self(IntegerIsa::Portable));
        available
    }

    /// The fastest of this machine, or the fastest that belongs to `isa`.
    pub fn best(isa: Option<Isa>) -> Self {
        let found = Self::available().into_iter().find(|found| isa.is_none_or(|isa| found.isa() <= isa));
        found.unwrap_or(Self(IntegerIsa::Portable))
    }

    /// The most tokens for which products row by row, without packing, are faster.
    pub fn few(self) -> usize {
        match self.0 {
            IntegerIsa::Portable => Portable::FEW,
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Avx2 => Avx2::FEW,
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Avx512 => Avx512::FEW,
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Vnni => Vnni::FEW,
        }
    }

    fn isa(self) -> Isa {
        match self.0 {
            IntegerIsa::Portable => Isa::Portable,
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Avx2 => Isa::Avx2,
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Avx512 | IntegerIsa::Vnni => Isa::Avx512,
        }
    }

    /// Runs work that is compiled for these instructions.
    pub(super) fn run(self, work: impl VectorWork) {
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,fma")]
            fn avx2(work: impl VectorWork) {
                work.run(Avx2(()));
            }
            #[target_feature(enable = "avx512f,avx512bw,avx2,fma")]
            fn avx512(work: impl VectorWork) {
                work.run(Avx512(()));
            }
            #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma")]
            fn vnni(work: impl VectorWork) {
                work.run(Vnni(()));
            }
            match self.0 {
                // SAFETY: a value exists only on machines with its instructions.
                IntegerIsa::Avx2 => return unsafe { avx2(work) },
                // SAFETY: as above.
                IntegerIsa::Avx512 => return unsafe { avx512(work) },
                // SAFETY: as above.
                IntegerIsa::Vnni => return unsafe { vnni(work) },
                IntegerIsa::Portable => (),
            }
        }
        work.run(Portable);
    }
}

impl Display for Instructions {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.pad(match self.0 {
            IntegerIsa::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Vnni => "avx512-vnni",
        })
    }
}

/// Work that is compiled for each instruction set. `run` must be inlined.
pub(super) trait VectorWork {
    fn run<L: Lanes>(self, lanes: L);
}
