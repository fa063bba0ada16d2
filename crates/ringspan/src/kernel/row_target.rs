//! The rows of a sum that a message is added to.

use std::ops::Range;

/// Rows of a sum, to which consecutive rows of a message are added.
#[derive(Debug, Clone, Copy)]
pub struct RowTarget<'a> {
    /// Rows of the sum, in the order of those of the message.
    pub rows: &'a [Range<usize>],
    /// Number of elements before the first row.
    pub offset: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Elements of a row that are added.
    pub width: usize,
}

impl RowTarget<'_> {
    /// Number of elements that are added.
    pub fn len(&self) -> usize {
        self.rows.iter().map(ExactSizeIterator::len).sum::<usize>() * self.width
    }

    /// Whether no element is added.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of elements that the sum must have at least.
    pub(super) fn end(&self) -> usize {
        let last = self.rows.iter().filter_map(|rows| rows.clone().next_back()).max();
        last.map_or(0, |row| self.offset + row * self.stride + self.width)
    }
}
