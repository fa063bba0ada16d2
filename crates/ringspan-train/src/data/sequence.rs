//! Sequences of S tokens, and the spans of documents that fill them.

use super::{IGNORE, encode::NOT_LEARNED};

/// Consecutive tokens of one document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) document: usize,
    pub(super) start: usize,
    pub(super) len: usize,
}

/// One sequence: segments of documents, end to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// S tokens (fewer only at the end of an evaluation).
    pub tokens: Vec<u32>,
    /// For each token the one that follows it in its segment; [`IGNORE`] for the last token of a segment, and where the loss
    /// leaves the next one out.
    pub targets: Vec<u32>,
    /// Lengths of the segments, in order; their sum is the number of tokens.
    pub segment_lengths: Vec<usize>,
}

impl Sequence {
    pub(super) fn with_capacity(length: usize) -> Self {
        Self { tokens: Vec::with_capacity(length), targets: Vec::with_capacity(length), segment_lengths: Vec::new() }
    }

    pub(super) fn push(&mut self, segment: &[u32]) {
        self.tokens.extend(segment.iter().map(|token| token & !NOT_LEARNED));
        self.targets.extend(segment[1..].iter().map(|&token| if token & NOT_LEARNED == 0 { token } else { IGNORE }));
        self.targets.push(IGNORE);
        self.segment_lengths.push(segment.len());
    }
}
