//! The input of one forward pass: rows of tokens, the segments of documents in them, and the targets.

use super::{IGNORE, Sequence};
use crate::error::Result;
use ringspan::Documents;
use std::ops::Range;

/// Consecutive tokens of one document in a row. The segments of a row follow each other from its start; tokens outside all
/// segments are padding, which no rank holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Index of the row.
    pub row: usize,
    /// Index of the segment's first token in the row.
    pub start: usize,
    /// Number of tokens, at least one.
    pub len: usize,
}

/// B rows of S tokens. Targets are shifted before rows are cut across ranks, so that no border loses one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Number of rows, B.
    pub rows: usize,
    /// Number of tokens per row, S.
    pub length: usize,
    /// Token ids [B, S]; 0 in padding.
    pub tokens: Vec<u32>,
    /// Target ids [B, S]; [`IGNORE`] where a token has no target.
    pub targets: Vec<u32>,
    /// The segments, sorted by row and start.
    pub segments: Vec<Segment>,
}

impl Batch {
    /// A batch whose rows are `sequences`, each padded at its end to `length` tokens.
    #[must_use]
    pub fn new(sequences: &[Sequence], length: usize) -> Self {
        let rows = sequences.len();
        let mut batch = Self {
            rows,
            length,
            tokens: vec![0; rows * length],
            targets: vec![IGNORE; rows * length],
            segments: vec![],
        };
        for (row, sequence) in sequences.iter().enumerate() {
            let len = sequence.tokens.len().min(length);
            batch.tokens[row * length..][..len].copy_from_slice(&sequence.tokens[..len]);
            batch.targets[row * length..][..len].copy_from_slice(&sequence.targets[..len]);
            let mut start = 0;
            for &len in &sequence.segment_lengths {
                batch.segments.push(Segment { row, start, len });
                start += len;
            }
        }
        batch
    }

    /// The segments as the documents of a batch [B, S]. Positions start at 0 in each segment.
    ///
    /// # Errors
    /// Segments that leave their row.
    pub fn documents(&self) -> Result<Documents> {
        self.documents_of(0..self.rows)
    }

    /// Like [`documents`](Self::documents), for some rows, as a batch of their own.
    pub(crate) fn documents_of(&self, rows: Range<usize>) -> Result<Documents> {
        let mut lengths = vec![Vec::new(); rows.len()];
        for segment in self.segments.iter().filter(|segment| rows.contains(&segment.row)) {
            lengths[segment.row - rows.start].push(segment.len);
        }
        Ok(Documents::from_rows(&lengths, self.length)?)
    }

    /// Number of tokens that have a target.
    #[must_use]
    pub fn valid_targets(&self) -> u64 {
        self.targets.iter().filter(|&&t| t != IGNORE).count() as u64
    }

    /// Number of tokens that are not padding.
    #[must_use]
    pub fn real_tokens(&self) -> u64 {
        self.segments.iter().map(|p| p.len as u64).sum()
    }

    /// The rows of part `index` of `chunks` equal parts; where rows do not divide, the first parts have one more. There may be
    /// none.
    pub(crate) fn chunk_rows(&self, index: usize, chunks: usize) -> Range<usize> {
        let first_row = |index: usize| (self.rows / chunks) * index + index.min(self.rows % chunks);
        first_row(index)..first_row(index + 1)
    }

    /// The range of the elements `[B, S]` that some rows have.
    pub(crate) fn elements_of(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.length..rows.end * self.length
    }

    /// Part `index` of `chunks` equal parts of the rows; where rows do not divide, the first parts have one more. It may be empty.
    #[must_use]
    pub fn chunk(&self, index: usize, chunks: usize) -> Self {
        let rows = self.chunk_rows(index, chunks);
        let elements = self.elements_of(&rows);
        let segments = self.segments.iter().filter(|segment| rows.contains(&segment.row));
        Self {
            rows: rows.len(),
            length: self.length,
            tokens: self.tokens[elements.clone()].to_vec(),
            targets: self.targets[elements].to_vec(),
            segments: segments.map(|segment| Segment { row: segment.row - rows.start, ..*segment }).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(segment_lengths: &[usize]) -> Sequence {
        let n: usize = segment_lengths.iter().sum();
        let tokens: Vec<u32> = (0..n as u32).collect();
        Sequence { targets: tokens.iter().map(|t| t + 1).collect(), tokens, segment_lengths: segment_lengths.to_vec() }
    }

    #[test]
    fn a_short_sequence_is_padded_outside_every_segment() {
        let batch = Batch::new(&[sequence(&[2, 2]), sequence(&[3])], 4);
        assert_eq!(batch.tokens, [0, 1, 2, 3, 0, 1, 2, 0]);
        assert_eq!(batch.targets[7], IGNORE);
        assert_eq!(batch.segments[2], Segment { row: 1, start: 0, len: 3 });
        assert_eq!((batch.valid_targets(), batch.real_tokens()), (7, 7));
    }

    #[test]
    fn parts_are_the_whole_in_order_and_may_be_empty() {
        let batch = Batch::new(&[sequence(&[2, 2]), sequence(&[4]), sequence(&[1, 3])], 4);
        for chunks in 1..6 {
            let all: Vec<Batch> = (0..chunks).map(|i| batch.chunk(i, chunks)).collect();
            assert_eq!(all.iter().map(|b| b.rows).sum::<usize>(), 3);
            assert_eq!(all.iter().flat_map(|b| b.tokens.clone()).collect::<Vec<_>>(), batch.tokens);
            assert_eq!(all.iter().map(|b| b.segments.len()).sum::<usize>(), 5);
            assert!(all.iter().all(|b| b.segments.iter().all(|p| p.row < b.rows)));
        }
        assert_eq!(batch.chunk(2, 3).segments[1], Segment { row: 0, start: 1, len: 3 });
    }
}
