//! Products of matrices in f32 and bf16, using the packing and the micro kernel of attention, on the threads of the pool
//! that the caller is in (or on one thread outside of any).
//!
//! Sums are f32, and do not depend on the number of threads. If both factors are bf16 and the processor multiplies bf16
//! (AVX512-BF16), its instruction takes two terms at once and treats denormal factors and sums as zero. Everything else is
//! computed in f32 according to IEEE 754; bf16 converts to f32 exactly. Infinities and NaN arise and spread as in plain
//! loops.
//!
//! Source: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008.

mod dots;
mod lines;
mod matrix;
mod packed;
mod panels;
mod right_factor;
mod run;
mod tasks;
#[cfg(test)]
mod test;
mod tile;

pub use matrix::{Element, Matrix};
pub use packed::Packed;
pub use right_factor::QuantizedRows;
pub use run::MOST_PACKED;

use super::buffer::{Target, written};
use super::isa::{Isa, TargetFeatures};
use half::bf16;
use lines::Lines;
use right_factor::RightFactor;
use std::fmt::{Display, Formatter};
use tile::{OutputTarget, ProductOutput};

/// The output of a product, `[m, n]`, row after row, and what is done with the sums.
#[derive(Debug)]
pub enum Output<'a> {
    /// Overwrites the output.
    Overwrite(&'a mut [f32]),
    /// Adds the sums to the output.
    Add(&'a mut [f32]),
    /// Overwrites the output with the sums, each rounded once, to nearest and ties to even.
    Rounded(&'a mut [bf16]),
}

impl Output<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Overwrite(out) | Self::Add(out) => out.len(),
            Self::Rounded(out) => out.len(),
        }
    }

    /// The output as workers share it: `n` columns.
    fn target(&mut self, n: usize) -> ProductOutput<'static> {
        let to = match self {
            Self::Overwrite(out) => OutputTarget::Overwrite(Target::new(out)),
            Self::Add(out) => OutputTarget::Add(Target::new(out)),
            Self::Rounded(out) => OutputTarget::Rounded(Target::new(out)),
        };
        ProductOutput { to, bias: None, n }
    }
}

/// The instructions that compute a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arithmetic {
    isa: Isa,
    /// Whether products of two bf16 factors are computed in bf16.
    bf16: bool,
}

impl Arithmetic {
    /// The arithmetic of an instruction set; `None` if this machine lacks it. Without `bf16`, products of bf16 are computed
    /// in f32 even if the processor could multiply bf16.
    pub fn new(isa: Isa, bf16: bool) -> Option<Self> {
        Isa::available().contains(&isa).then_some(Self { isa, bf16: bf16 && isa.multiplies_bf16() })
    }

    /// The fastest arithmetic of this machine.
    pub fn best() -> Self {
        let isa = Isa::best();
        Self { isa, bf16: isa.multiplies_bf16() }
    }

    /// All kinds of arithmetic that this machine has, fastest first.
    pub fn available() -> Vec<Self> {
        let of = |isa: Isa| [true, false].into_iter().filter(move |bf16| !bf16 || isa.multiplies_bf16());
        Isa::available().into_iter().flat_map(|isa| of(isa).map(move |bf16| Self { isa, bf16 })).collect()
    }

    /// `a b`: a `[m, k]`, b `[k, n]`, out `[m, n]`.
    ///
    /// # Panics
    /// If the sizes do not fit.
    pub fn product<A: Element, B: Element>(self, a: Matrix<A>, b: Matrix<B>, out: Output) {
        self.write_product::<A, B>(a, RightFactor::new(b), out);
    }

    /// `a b^T`: a `[m, k]`, b `[n, k]`, out `[m, n]`. At most about [`MOST_PACKED`] numbers of b are dequantized at once.
    ///
    /// # Panics
    /// If the sizes do not fit.
    pub fn product_quantized_t(self, a: Matrix, b: &dyn QuantizedRows, out: Output) {
        self.write_product::<f32, f32>(a, RightFactor::quantized_t(b), out);
    }

    /// `a b`, plus the bias in each row, as a new matrix, to which nothing is written before: a `[m, k]`, b `[k, n]`, bias `[n]`
    /// to `[m, n]`.
    ///
    /// # Panics
    /// Sizes that do not fit.
    pub fn product_new<A: Element, B: Element>(self, a: Matrix<A>, b: Matrix<B>, bias: Option<&[f32]>) -> Vec<f32> {
        self.new_matrix::<A, B, _>(a, RightFactor::new(b), bias, OutputTarget::Overwrite)
    }

    /// `a b^T`, plus the bias in each row, as a new matrix, to which nothing is written before: a `[m, k]`, b `[n, k]`, bias `[n]` to
    /// `[m, n]`. At most about [`MOST_PACKED`] numbers of b are dequantized at once.
    ///
    /// # Panics
    /// Sizes that do not fit.
    pub fn product_new_quantized_t(self, a: Matrix, b: &dyn QuantizedRows, bias: Option<&[f32]>) -> Vec<f32> {
        self.new_matrix::<f32, f32, _>(a, RightFactor::quantized_t(b), bias, OutputTarget::Overwrite)
    }

    /// Like [`product_new`](Self::product_new), each sum rounded once, to the nearest and to even.
    ///
    /// # Panics
    /// Sizes that do not fit.
    pub fn product_new_rounded<A: Element, B: Element>(
        self,
        a: Matrix<A>,
        b: Matrix<B>,
        bias: Option<&[f32]>,
    ) -> Vec<bf16> {
        self.new_matrix::<A, B, _>(a, RightFactor::new(b), bias, OutputTarget::Rounded)
    }

    /// `a b` of factors of these types.
    fn write_product<A: Element, B: Element>(self, a: Matrix<A>, b: RightFactor, out: Output) {
        let ((m, k), (rows, n)) = (a.shape(), b.shape());
        let fits = rows == k && m.checked_mul(n) == Some(out.len());
        assert!(fits, "a product of {m} x {k} and {rows} x {n} into {}", out.len());
        run::product(self.features::<A, B>(), Lines::new(a), b, out);
    }

    /// `a b` of factors of these types.
    fn new_matrix<A: Element, B: Element, T>(
        self,
        a: Matrix<A>,
        b: RightFactor,
        bias: Option<&[f32]>,
        target: impl FnOnce(Target<T>) -> OutputTarget,
    ) -> Vec<T> {
        let ((m, k), (rows, n)) = (a.shape(), b.shape());
        let size = m.checked_mul(n).filter(|_| rows == k && bias.is_none_or(|bias| bias.len() == n));
        let Some(size) = size else {
            let bias = bias.map_or(String::new(), |bias| format!(" with a bias of {}", bias.len()));
            panic!("a product of {m} x {k} and {rows} x {n}{bias}")
        };
        let a = Lines::new(a);
        let write = |out| run::product_to(self.features::<A, B>(), a, b, ProductOutput { to: target(out), bias, n });
        // SAFETY: a product writes each element of an output that it does not add to, and reads none.
        unsafe { written(size, write) }
    }

    fn features<A: Element, B: Element>(self) -> TargetFeatures {
        TargetFeatures::new(self.isa).with_pairs(self.bf16 && A::IS_BF16 && B::IS_BF16)
    }
}

impl Display for Arithmetic {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.pad(&format!("{}{}", self.isa, if self.bf16 { "+bf16" } else { "" }))
    }
}
