//! A run: tokens of one document whose positions are equally far apart.

use std::ops::Range;

/// Tokens of one document in arithmetic progression: positions `start, start + step, ..`, `len` of them.
///
/// ```
/// use ringspan::Run;
///
/// let run = Run { document: 0, start: 5, len: 4, step: 3 };
/// assert_eq!(run.positions().collect::<Vec<_>>(), [5, 8, 11, 14]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// Index of the document in its [`Documents`](super::Documents).
    pub document: usize,
    /// Position of the first token inside the document.
    pub start: usize,
    /// Number of tokens.
    pub len: usize,
    /// Distance between neighbouring positions; 1 unless the layout is striped.
    pub step: usize,
}

impl Run {
    /// Positions inside the document, in order.
    pub fn positions(self) -> impl Iterator<Item = usize> {
        (0..self.len).map(move |i| self.start + i * self.step)
    }

    /// Position of the last token. The run must not be empty.
    pub(crate) fn last(&self) -> usize {
        self.start + (self.len - 1) * self.step
    }

    /// The run of the tokens with indices `tokens` in this run.
    pub(crate) fn part(&self, tokens: &Range<usize>) -> Self {
        Self { start: self.start + tokens.start * self.step, len: tokens.len(), ..*self }
    }

    /// Whether `next` continues the progression where this run ends, so that both can be merged into one run.
    pub(crate) fn continues_with(&self, next: &Run) -> bool {
        let step = if self.len > 1 { self.step } else { next.step };
        self.document == next.document
            && (next.len == 1 || next.step == step)
            && self.start + self.len * step == next.start
    }
}
