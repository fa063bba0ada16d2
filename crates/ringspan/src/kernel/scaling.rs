//! Where the scale of scores is applied: to queries before the product with keys, or to the products.

use super::{Data, Score, View};

/// Factors that scale queries before the product, and products after it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scaling {
    /// Factor on queries, before the product.
    pub(super) queries: f32,
    /// Factor on products.
    pub(super) products: f32,
}

impl Scaling {
    /// Chooses where to scale, for a call with or without [`ScoreTerms`]. The factor is the scale or, with a softcap, scale / cap, since
    /// tanh takes the product divided by the cap.
    ///
    /// Scaling queries costs nothing, but rounds each of their numbers. With products of f32 this is negligible, and a
    /// power of 2 rounds nothing; products of narrower types are nearly exact, so they are scaled themselves.
    pub(super) fn new(score: &Score, terms: bool, q: &View) -> Self {
        let factor = score.softcap.map_or(score.scale, |cap| score.scale / cap);
        let power_of_2 = factor.is_normal() && factor.to_bits().trailing_zeros() >= f32::MANTISSA_DIGITS - 1;
        // A hidden product is -inf, which a negative factor would turn into inf.
        let early = !terms && (power_of_2 || matches!(q.data, Data::F32(_)) || factor <= 0.0);
        if early { Self { queries: factor, products: 1.0 } } else { Self { queries: 1.0, products: factor } }
    }

    /// The factors for products of bf16, whose queries are packed unscaled.
    pub(super) fn of_pairs(self) -> Self {
        Self { queries: 1.0, products: self.queries * self.products }
    }
}
