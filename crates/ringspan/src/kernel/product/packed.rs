//! A right factor that is packed once and used in many products.

use super::super::buffer::Aligned;
use super::super::isa::TargetFeatures;
use super::lines::Lines;
use super::panels::Panels;
use super::right_factor::RightFactor;
use super::tasks::threads;
use super::{Arithmetic, Element, Matrix, Output, run};
use std::marker::PhantomData;

/// The right factor b `[k, n]` of products with left factors of type A, in the order in which products read it.
///
/// It takes two bytes per element if products are in bf16, else four; n is rounded up to whole vectors, k to whole pairs.
/// Packing orders elements along the terms of the sums, so `x W^T` and `dy W` each need their own.
pub struct Packed<A> {
    features: TargetFeatures,
    data: Aligned,
    panels: Panels,
    terms: usize,
    columns: usize,
    left: PhantomData<fn(A)>,
}

impl Arithmetic {
    /// Packs b for products with left factors of type A, on the threads of the pool that this thread belongs to.
    pub fn pack<A: Element, B: Element>(self, b: Matrix<B>) -> Packed<A> {
        let ((terms, columns), features) = (b.shape(), self.features::<A, B>());
        let panels = Panels::new(features, columns);
        let all = 0..panels.count();
        let threads = threads([terms, columns, 1]);
        let data = RightFactor::new(b).pack(features, threads, &(0..terms), (panels, &all));
        Packed { features, data, panels, terms, columns, left: PhantomData }
    }
}

impl<A: Element> Packed<A> {
    /// `a b`: a `[m, k]`, out `[m, n]`. It has the same bits as [`Arithmetic::product`] if that packs all terms of b at once, too: for
    /// more than 4 rows, and at most 1536 terms.
    ///
    /// # Panics
    /// If the sizes do not fit.
    pub fn product(&self, a: Matrix<A>, out: Output) {
        let ((m, k), n) = (a.shape(), self.columns);
        let fits = self.terms == k && m.checked_mul(n) == Some(out.len());
        assert!(fits, "a product of {m} x {k} and {} x {n} into {}", self.terms, out.len());
        run::product_packed(self.features, Lines::new(a), self.panels, &self.data, out);
    }

    /// Number of rows and columns of b.
    pub fn shape(&self) -> (usize, usize) {
        (self.terms, self.columns)
    }

    /// Bytes of the packed elements.
    pub fn bytes(&self) -> usize {
        size_of_val::<[f32]>(&self.data)
    }
}
