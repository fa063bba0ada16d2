//! The instruction sets of the blocked kernels on a CPU, and the sizes of the blocks that suit each.

use super::vector::PORTABLE_COLUMNS;
#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512};
use crate::error::{Error, Result};
use std::fmt::{Display, Formatter};
use std::str::FromStr;

/// An instruction set that the blocked kernels support.
///
/// Its names in options and output are `portable`, `avx2` and `avx512`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Vectors as the compiler makes them from plain Rust: 8 lanes with AVX on x86-64, otherwise 4.
    Portable,
    /// AVX2 and FMA: 8 lanes.
    Avx2,
    /// AVX-512F: 16 lanes.
    Avx512,
}

impl Isa {
    /// The instruction sets that this machine has, fastest first.
    pub fn available() -> Vec<Isa> {
        #[cfg(target_arch = "x86_64")]
        {
            let wide = Avx512::<false>::detect().map(|_| Isa::Avx512).into_iter();
            wide.chain(Avx2::detect().map(|_| Isa::Avx2)).chain([Isa::Portable]).collect()
        }
        #[cfg(not(target_arch = "x86_64"))]
        vec![Isa::Portable]
    }

    /// The fastest instruction set of this machine.
    pub fn best() -> Isa {
        Self::available().first().copied().unwrap_or(Isa::Portable)
    }

    /// Refuses an instruction set that this machine lacks.
    ///
    /// # Errors
    /// [`Error::MissingIsa`].
    pub fn check_available(self) -> Result<()> {
        let available = Self::available();
        if available.contains(&self) {
            return Ok(());
        }
        let names: Vec<String> = available.iter().map(Self::to_string).collect();
        Err(Error::MissingIsa { isa: self.to_string(), available: names.join(", ") })
    }

    /// Whether the blocked kernels multiply q, k and v stored in bf16 as bf16, with sums in f32.
    pub fn multiplies_bf16(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self == Isa::Avx512 && Avx512::<true>::detect().is_some();
        #[cfg(not(target_arch = "x86_64"))]
        false
    }
}

impl Display for Isa {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        })
    }
}

impl FromStr for Isa {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let known = [Isa::Portable, Isa::Avx2, Isa::Avx512];
        let found = known.into_iter().find(|isa| isa.to_string() == name);
        found.ok_or_else(|| Error::UnknownIsa { name: name.into() })
    }
}

/// The instruction set and options that the functions of a call are compiled for.
#[derive(Debug, Clone, Copy)]
pub(super) struct TargetFeatures {
    pub(super) isa: Isa,
    /// Whether products take pairs of bf16.
    pub(super) pairs: bool,
    /// Whether portable code is compiled for AVX.
    pub(super) avx: bool,
}

impl TargetFeatures {
    /// The features of an instruction set that this machine has, without products of bf16.
    pub(super) fn new(isa: Isa) -> Self {
        #[cfg(target_arch = "x86_64")]
        let avx = is_x86_feature_detected!("avx");
        #[cfg(not(target_arch = "x86_64"))]
        let avx = false;
        Self { isa, pairs: false, avx }
    }

    /// Enables products of bf16 if `pairs` is set and the instruction set has them.
    pub(super) fn with_pairs(self, pairs: bool) -> Self {
        Self { pairs: pairs && self.isa.multiplies_bf16(), ..self }
    }

    /// Disables AVX, to test machines without it.
    pub(super) fn without_avx(self) -> Self {
        Self { avx: false, ..self }
    }

    pub(super) fn isa(self) -> Isa {
        self.isa
    }

    /// Number of terms of a sum that a product takes at once: 1, or 2 in bf16.
    pub(super) fn pair(self) -> usize {
        if self.pairs { 2 } else { 1 }
    }

    /// Number of queries in a block: the lanes of as many vectors as a product takes.
    pub(super) fn lanes(self) -> usize {
        let vectors = if self.isa == Isa::Portable { PORTABLE_COLUMNS } else { 3 };
        vectors * self.vector()
    }

    /// Number of f32 in a vector.
    pub(super) fn vector(self) -> usize {
        match self.isa {
            Isa::Portable if !self.avx => 4,
            Isa::Portable | Isa::Avx2 => 8,
            Isa::Avx512 => 16,
        }
    }

    /// Number of keys that the micro kernel takes at once: as many as fit into the registers with three vectors of queries.
    pub(super) fn rows(self) -> usize {
        match self.isa {
            Isa::Avx512 => 8,
            _ => 4,
        }
    }
}
