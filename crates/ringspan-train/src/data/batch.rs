//! The input of one forward pass: rows of tokens, the pieces of documents in them, and the targets.

use super::{IGNORE, packing::Sequence};
use crate::error::Result;
use ringspan::Documents;

/// A stretch of one document in a row; the pieces of a row follow each other from its start. Tokens outside every piece are
/// padding: no rank holds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Index of the row.
    pub row: usize,
    /// Index of the piece's first token in the row.
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
    /// The pieces, sorted by row and start.
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

    /// The pieces as the documents of a batch [B, S]. Positions start at 0 in each piece.
    ///
    /// # Errors
    /// Pieces that leave their row.
    pub fn documents(&self) -> Result<Documents> {
        let mut rows = vec![Vec::new(); self.rows];
        for segment in &self.segments {
            rows[segment.row].push(segment.len);
        }
        Ok(Documents::from_rows(&rows, self.length)?)
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

    /// Part `index` of `chunks` equal parts of the rows; where rows do not divide, the first parts have one more. It may be empty.
    #[must_use]
    pub fn chunk(&self, index: usize, chunks: usize) -> Self {
        let first_row = |i: usize| (self.rows / chunks) * i + i.min(self.rows % chunks);
        let (from, to) = (first_row(index), first_row(index + 1));
        Self {
            rows: to - from,
            length: self.length,
            tokens: self.tokens[from * self.length..to * self.length].to_vec(),
            targets: self.targets[from * self.length..to * self.length].to_vec(),
            segments: self
                .segments
                .iter()
                .filter(|p| (from..to).contains(&p.row))
                .map(|p| Segment { row: p.row - from, ..*p })
                .collect(),
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
    fn a_short_sequence_is_padded_outside_every_piece() {
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
