//! Products of matrices in f32 and bf16, by the packing and the micro kernel of attention, on the threads of the pool that
//! the caller is in (one thread outside of any).
//!
//! Sums are f32, and do not depend on the number of threads. Where both factors are bf16 and the processor multiplies bf16
//! (AVX512-BF16), its instruction takes two terms at once and treats denormal numbers as zero: factors, and sums. Everything
//! else is computed in f32, as IEEE 754 says, from what bf16 widens to without loss. Infinities and NaN arise and spread as
//! in plain loops.
//!
//! Source: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008.

mod dots;
mod lines;
mod matrix;
mod packed;
mod panels;
mod run;
#[cfg(test)]
mod test;
mod tile;

pub use matrix::{Element, Matrix};
pub use packed::Packed;

pub(super) use dots::Dots;
pub(super) use lines::Lines;
pub(super) use panels::Panels;
pub(super) use tile::Block;

use super::buffer::Target;
use super::isa::{Code, Isa};
use half::bf16;
use std::fmt::{Display, Formatter};
use tile::ProductOutput;

/// What a product does with its output, `[m, n]`, row after row.
#[derive(Debug)]
pub enum Output<'a> {
    /// Writes over it.
    Fresh(&'a mut [f32]),
    /// Adds to it.
    Sum(&'a mut [f32]),
    /// Writes over it, each sum rounded once, to the nearest and to even.
    Rounded(&'a mut [bf16]),
}

impl Output<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Fresh(out) | Self::Sum(out) => out.len(),
            Self::Rounded(out) => out.len(),
        }
    }

    /// Takes sums of no terms.
    fn take_nothing(&mut self) {
        match self {
            Self::Fresh(out) => out.fill(0.0),
            Self::Sum(_) => (),
            Self::Rounded(out) => out.fill(bf16::ZERO),
        }
    }

    fn place(&mut self) -> ProductOutput {
        match self {
            Self::Fresh(out) => ProductOutput::Fresh(Target::new(out)),
            Self::Sum(out) => ProductOutput::Sum(Target::new(out)),
            Self::Rounded(out) => ProductOutput::Rounded(Target::new(out)),
        }
    }
}

/// The instructions that products are computed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arithmetic {
    isa: Isa,
    /// Whether products of bf16 are taken in bf16.
    bf16: bool,
}

impl Arithmetic {
    /// The arithmetic of an instruction set; `None` if this machine lacks it. Without `bf16`, products of bf16 are taken in f32 even
    /// where the processor could.
    pub fn new(isa: Isa, bf16: bool) -> Option<Self> {
        Isa::available().contains(&isa).then_some(Self { isa, bf16: bf16 && isa.multiplies_bf16() })
    }

    /// The fastest of this machine.
    pub fn best() -> Self {
        let isa = Isa::best();
        Self { isa, bf16: isa.multiplies_bf16() }
    }

    /// All of this machine, the fastest first.
    pub fn available() -> Vec<Self> {
        let of = |isa: Isa| [true, false].into_iter().filter(move |bf16| !bf16 || isa.multiplies_bf16());
        Isa::available().into_iter().flat_map(|isa| of(isa).map(move |bf16| Self { isa, bf16 })).collect()
    }

    /// `a b`: a `[m, k]`, b `[k, n]`, out `[m, n]`.
    ///
    /// # Panics
    /// Sizes that do not fit.
    pub fn product<A: Element, B: Element>(self, a: Matrix<A>, b: Matrix<B>, out: Output) {
        let ((m, k), (rows, n)) = (a.shape(), b.shape());
        let fits = rows == k && m.checked_mul(n) == Some(out.len());
        assert!(fits, "a product of {m} x {k} and {rows} x {n} into {}", out.len());
        run::product(self.code::<A, B>(), Lines::new(a), Lines::new(b.t()), out);
    }

    fn code<A: Element, B: Element>(self) -> Code {
        Code::new(self.isa).with_pairs(self.bf16 && A::IS_BF16 && B::IS_BF16)
    }
}

impl Display for Arithmetic {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.pad(&format!("{}{}", self.isa, if self.bf16 { "+bf16" } else { "" }))
    }
}
