//! A right factor that is packed once and multiplied often.

use super::super::buffer::Aligned;
use super::super::isa::Code;
use super::lines::Lines;
use super::panels::Panels;
use super::{Arithmetic, Element, Matrix, Output, run};
use std::marker::PhantomData;

/// The right factor b `[k, n]` of products with left factors of A, in the order in which they read it.
///
/// It holds two bytes an element where the product is taken in bf16, else four; n is rounded up to whole vectors, k to whole
/// pairs. Packing reads along the terms of the sums, so `x W^T` and `dy W` need one each.
pub struct Packed<A> {
    code: Code,
    data: Aligned,
    panels: Panels,
    terms: usize,
    columns: usize,
    left: PhantomData<fn(A)>,
}

impl Arithmetic {
    /// Packs b for products with left factors of A, on the threads of the pool that this thread belongs to.
    pub fn pack<A: Element, B: Element>(self, b: Matrix<B>) -> Packed<A> {
        let ((terms, columns), code) = (b.shape(), self.code::<A, B>());
        let panels = Panels::new(code, columns);
        let all = 0..panels.count();
        let threads = run::threads([terms, columns, 1]);
        let data = run::pack(code, threads, Lines::new(b.t()), &(0..terms), (panels, &all));
        Packed { code, data, panels, terms, columns, left: PhantomData }
    }
}

impl<A: Element> Packed<A> {
    /// `a b`: a `[m, k]`, out `[m, n]`. The bits are those of [`Arithmetic::product`] where that packs too, and at once: of
    /// more than 4 rows, and at most 4096 terms.
    ///
    /// # Panics
    /// Sizes that do not fit.
    pub fn product(&self, a: Matrix<A>, out: Output) {
        let ((m, k), n) = (a.shape(), self.columns);
        let fits = self.terms == k && m.checked_mul(n) == Some(out.len());
        assert!(fits, "a product of {m} x {k} and {} x {n} into {}", self.terms, out.len());
        run::product_packed(self.code, Lines::new(a), self.panels, &self.data, out);
    }

    /// Rows and columns of b.
    pub fn shape(&self) -> (usize, usize) {
        (self.terms, self.columns)
    }

    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        size_of_val::<[f32]>(&self.data)
    }
}
