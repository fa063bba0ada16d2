//! Some heads and rows of a tensor, which are packed into a message.

use super::View;
use std::ops::Range;

/// Some heads and rows of a tensor.
#[derive(Debug)]
pub struct TensorSlice<'a> {
    /// The whole tensor.
    pub view: View<'a>,
    /// Heads of the slice.
    pub heads: Range<usize>,
    /// Rows of the slice, in this order.
    pub rows: &'a [Range<usize>],
}

impl TensorSlice<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.rows.iter().map(ExactSizeIterator::len).sum::<usize>() * self.heads.len() * self.view.dim
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
