//! Tokens in arithmetic progression.

use std::ops::Range;

/// Tokens of one document in arithmetic progression: positions `start, start + step, ..`, `len` of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// Index of the document in its [`Documents`](super::Documents).
    pub document: usize,
    /// Position of the first token inside the document.
    pub start: usize,
    /// Tokens.
    pub len: usize,
    /// Distance of neighbours; 1 unless the layout is striped.
    pub step: usize,
}

impl Run {
    /// Positions inside the document, in order.
    pub fn positions(self) -> impl Iterator<Item = usize> {
        (0..self.len).map(move |i| self.start + i * self.step)
    }

    /// Position of the last token; the run has one.
    pub(crate) fn last(&self) -> usize {
        self.start + (self.len - 1) * self.step
    }

    /// Some of its tokens.
    pub(crate) fn part(&self, tokens: &Range<usize>) -> Self {
        Self { start: self.start + tokens.start * self.step, len: tokens.len(), ..*self }
    }

    /// Whether `next` goes on where this run ends, so that both are one run.
    pub(crate) fn continues_with(&self, next: &Run) -> bool {
        let step = if self.len > 1 { self.step } else { next.step };
        self.document == next.document
            && (next.len == 1 || next.step == step)
            && self.start + self.len * step == next.start
    }
}
