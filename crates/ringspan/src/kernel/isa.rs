//! Instruction sets, and the functions of the blocked kernels compiled for each of them.

use super::Tile;
use super::backward::{Backward, Share};
use super::buffer::Target;
use super::decode::Decode;
use super::delta::Delta;
use super::forward::{BlockTask, Forward};
use super::pack::Packing;
use super::product::{Block, Dots, Lines, Panels};
#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512};
use super::vector::{PORTABLE_COLUMNS, Portable};
use crate::error::{Error, Result};
use std::fmt::{Display, Formatter};
use std::ops::Range;
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
pub(super) struct Code {
    isa: Isa,
    /// Whether products take pairs of bf16.
    pairs: bool,
    /// Whether portable code is compiled for AVX.
    avx: bool,
}

impl Code {
    /// The code for an instruction set that this machine has.
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

/// Defines a function that calls a kernel function compiled for the instruction set in `code`. The lists are its constants
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
        pub(super) unsafe fn $name(code: Code, job: &$job, $($argument: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f")]
                unsafe fn avx512(simd: Avx512<false>, job: &$job, $($argument: $type),*) {
                    // SAFETY: the contract of the caller.
                    unsafe { job.$call::<_, $($wide),*>(simd, $($argument),*) }
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
                unsafe fn avx512_pairs(simd: Avx512<true>, job: &$job, $($argument: $type),*) {
                    // SAFETY: the contract of the caller.
                    unsafe { job.$call::<_, $($wide),*>(simd, $($argument),*) }
                }
                #[target_feature(enable = "avx2,fma")]
                unsafe fn avx2(simd: Avx2, job: &$job, $($argument: $type),*) {
                    // SAFETY: the contract of the caller.
                    unsafe { job.$call::<_, $($narrow),*>(simd, $($argument),*) }
                }
                #[target_feature(enable = "avx")]
                unsafe fn avx(job: &$job, $($argument: $type),*) {
                    // SAFETY: the contract of the caller.
                    unsafe { job.$call::<_, $({ $portable }),*>(Portable::<8>, $($argument),*) }
                }
                match code.isa {
                    Isa::Avx512 if code.pairs => {
                        if let Some(simd) = Avx512::detect() {
                            // SAFETY: the token proves the features; the rest is the contract of the caller.
                            return unsafe { avx512_pairs(simd, job, $($argument),*) };
                        }
                    }
                    Isa::Avx512 => {
                        if let Some(simd) = Avx512::detect() {
                            // SAFETY: as above.
                            return unsafe { avx512(simd, job, $($argument),*) };
                        }
                    }
                    Isa::Avx2 => {
                        if let Some(simd) = Avx2::detect() {
                            // SAFETY: as above.
                            return unsafe { avx2(simd, job, $($argument),*) };
                        }
                    }
                    // SAFETY: the machine has AVX; the rest is the contract of the caller.
                    Isa::Portable if code.avx => return unsafe { avx(job, $($argument),*) },
                    Isa::Portable => (),
                }
            }
            debug_assert_eq!(code.isa, Isa::Portable);
            // SAFETY: the contract of the caller.
            unsafe { job.$call::<_, $({ $portable }),*>(Portable::<4>, $($argument),*) }
        }
    };
}

dispatch!(
    pack_chunk,
    Packing<'_>,
    chunk<[8], [4], [4]>(head: usize, slot: usize, chunk: usize),
    "[`Packing::chunk`] compiled for `isa`."
);
dispatch!(
    forward_block,
    Forward<'_>,
    block<[8, 3], [4, 3], [4, PORTABLE_COLUMNS]>(task: BlockTask, scratch: &mut [f32]),
    "[`Forward::block`] compiled for `isa`."
);
dispatch!(
    backward_head,
    Backward<'_>,
    head<[8, 3], [4, 3], [4, PORTABLE_COLUMNS]>(share: Share<'_>, scratch: &mut [f32]),
    "[`Backward::head`] compiled for `isa`."
);
dispatch!(delta_head, Delta<'_>, head<[], [], []>(head: usize, scratch: &mut [f32]), "[`Delta::head`] compiled for `isa`.");
dispatch!(
    decode_chunk,
    Decode<'_>,
    chunk<[], [], []>(kv: usize, rows: Range<usize>, tile: &Tile, states: &mut [f32], scratch: &mut [f32]),
    "[`Decode::chunk`] compiled for `isa`."
);
dispatch!(
    product_rows,
    Lines<'_>,
    pack_rows<[8], [4], [4]>(rows: Range<usize>, terms: Range<usize>, to: &mut [f32]),
    "[`Lines::pack_rows`] compiled for `isa`."
);
dispatch!(
    product_columns,
    Lines<'_>,
    pack_columns<[], [], []>(columns: Range<usize>, terms: Range<usize>, width: usize, to: &mut [f32]),
    "[`Lines::pack_columns`] compiled for `isa`."
);
dispatch!(
    product_columns_across,
    Lines<'_>,
    pack_columns_across<[], [], []>
    (panels: Panels, group: Range<usize>, terms: Range<usize>, to: Target, at: usize),
    "[`Lines::pack_columns_across`] compiled for `isa`."
);
dispatch!(
    product_block,
    Block<'_>,
    multiply<[8, 3], [4, 3], [4, PORTABLE_COLUMNS]>
    (panel: &[f32], next: &[f32], columns: Range<usize>, sums: &mut [f32]),
    "[`Block::multiply`] compiled for `isa`."
);
dispatch!(
    product_dots,
    Dots<'_>,
    columns<[], [], []>(columns: Range<usize>, scratch: &mut [f32]),
    "[`Dots::columns`] compiled for `isa`."
);
