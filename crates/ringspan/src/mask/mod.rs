//! Masks as a person names them, and the bands they become.

mod band;

pub use band::Band;

use crate::error::{Error, Result};
use crate::layout::Run;

/// Which keys a query may see. Documents and padding are not masks: they are in the layout.
///
/// Query i sees key j iff `i - left <= j <= i + right` (a missing side has no limit), where i and j are positions in
/// the document. Aligned to the end, i counts from (length of the keys - length of the queries), so that the last
/// query stands at the last key: queries behind a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mask {
    left: Option<usize>,
    right: Option<usize>,
    end_aligned: bool,
}

impl Mask {
    /// Every query sees every key of its document.
    pub const fn full() -> Self {
        Self { left: None, right: None, end_aligned: false }
    }

    /// Query i sees keys up to i.
    pub const fn causal() -> Self {
        Self { left: None, right: Some(0), end_aligned: false }
    }

    /// Causal, with the last query at the last key.
    pub const fn causal_bottom_right() -> Self {
        Self { left: None, right: Some(0), end_aligned: true }
    }

    /// Narrows the mask to a window of `left` keys before and `right` keys after the query's position.
    pub fn window(self, left: Option<usize>, right: Option<usize>) -> Self {
        let narrower = |a: Option<usize>, b: Option<usize>| match (a, b) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        Self { left: narrower(self.left, left), right: narrower(self.right, right), ..self }
    }

    /// Whether the frame of the queries is aligned to the end of the keys.
    pub fn is_end_aligned(self) -> bool {
        self.end_aligned
    }

    /// Whether no key after a query's position is visible.
    pub fn is_causal(self) -> bool {
        self.right == Some(0)
    }

    /// Whether a query at position `i` sees a key at position `j`, given the lengths of their document's frames.
    pub fn sees(self, i: usize, j: usize, queries: usize, keys: usize) -> bool {
        let distance = i as i64 + self.shift(queries, keys) - j as i64;
        self.left.is_none_or(|left| distance <= left as i64) && self.right.is_none_or(|right| -distance <= right as i64)
    }

    /// The band between a run of queries and a run of keys of one document, or `None` where nothing is visible.
    ///
    /// `queries` and `keys` are the lengths of the document's frames, which an end-aligned mask needs.
    ///
    /// # Errors
    /// Runs of more than one token with unequal steps: their mask is no band.
    pub fn band(self, q: &Run, k: &Run, queries: usize, keys: usize) -> Result<Option<Band>> {
        if q.document != k.document || q.len == 0 || k.len == 0 {
            return Ok(None);
        }
        // A run of one token has any step.
        let step = match (q.len, k.len) {
            (_, 1) => q.step,
            (1, _) => k.step,
            _ if q.step == k.step => q.step,
            _ => {
                return Err(Error::Layout(format!(
                    "runs with steps {} (queries) and {} (keys) have no band; use the same layout for both",
                    q.step, k.step
                )));
            }
        } as i64;
        // Position distance = first + step * (i - j), to lie in -right ..= left.
        let first = q.start as i64 + self.shift(queries, keys) - k.start as i64;
        let lo = match self.right {
            Some(right) => div_ceil(-(right as i64) - first, step),
            None => i64::MIN / 4,
        };
        let hi = match self.left {
            Some(left) => (left as i64 - first).div_euclid(step),
            None => i64::MAX / 4,
        };
        Ok(Band { lo, hi }.clamp(q.len, k.len))
    }

    fn shift(self, queries: usize, keys: usize) -> i64 {
        if self.end_aligned { keys as i64 - queries as i64 } else { 0 }
    }
}

fn div_ceil(a: i64, b: i64) -> i64 {
    -(-a).div_euclid(b)
}

impl std::fmt::Display for Mask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match (self.right, self.end_aligned) {
            (Some(0), true) => "causal-bottom-right",
            (Some(0), false) => "causal",
            (_, true) => "full (aligned to the end)",
            (_, false) => "full",
        };
        f.write_str(name)?;
        let right = self.right.filter(|&right| right != 0);
        if self.left.is_some() || right.is_some() {
            let side = |side: Option<usize>| side.map_or("any".to_owned(), |n| n.to_string());
            write!(f, ", window {} back, {} ahead", side(self.left), side(self.right))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn side() -> impl Strategy<Value = Option<usize>> {
        proptest::option::of(0usize..12)
    }

    proptest! {
        #[test]
        fn band_equals_mask_on_every_pair(
            (left, right, causal, end) in (side(), side(), any::<bool>(), any::<bool>()),
            (qs, ql, ks, kl, step) in (0usize..20, 0usize..9, 0usize..20, 0usize..9, 1usize..6),
            (frame_q, frame_k) in (60usize..80, 60usize..80),
        ) {
            let mut mask = if causal { Mask::causal() } else { Mask::full() };
            mask.end_aligned = end;
            let mask = mask.window(left, right);
            let q = Run { document: 0, start: qs, len: ql, step };
            let k = Run { document: 0, start: ks, len: kl, step };
            let band = mask.band(&q, &k, frame_q, frame_k).expect("equal steps");
            for i in 0..ql {
                for j in 0..kl {
                    let sees = mask.sees(qs + i * step, ks + j * step, frame_q, frame_k);
                    prop_assert_eq!(sees, band.is_some_and(|b| b.sees(i, j)));
                }
            }
        }
    }

    #[test]
    fn another_document_is_never_seen() {
        let q = Run { document: 0, start: 0, len: 4, step: 1 };
        let k = Run { document: 1, ..q };
        assert_eq!(Mask::full().band(&q, &k, 4, 4), Ok(None));
    }

    #[test]
    fn unequal_steps_are_refused() {
        let q = Run { document: 0, start: 0, len: 4, step: 1 };
        let k = Run { step: 2, ..q };
        assert!(Mask::causal().band(&q, &k, 8, 8).is_err());
    }
}
