//! Documents to sequences of exactly S tokens, without padding and without a document seeing another.

use super::{IGNORE, fingerprint};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Where the packer stands. With the documents, the sequence length and the seed it fixes everything that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Full passes over the documents so far.
    pub epoch: u64,
    /// Documents of this pass that are done.
    pub document: usize,
    /// Tokens of the next document that are done.
    pub offset: usize,
}

/// One sequence: pieces of documents, end to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// S tokens (fewer only at the end of an evaluation).
    pub tokens: Vec<u32>,
    /// For each token the one that follows it in its piece; [`IGNORE`] for the last of a piece.
    pub targets: Vec<u32>,
    /// Lengths of the pieces, in order; their sum is the number of tokens.
    pub pieces: Vec<usize>,
}

/// Deals out documents as sequences, shuffled anew each pass. A document longer than what is left of a sequence goes on
/// in the next one as a new piece.
#[derive(Debug, Clone)]
pub struct Packer {
    documents: Arc<Vec<Vec<u32>>>,
    length: usize,
    seed: u64,
    position: Position,
    order: Vec<usize>,
}

impl Packer {
    /// A packer at `position` of `documents` (none may be empty), for sequences of `length` tokens.
    #[must_use]
    pub fn new(documents: Arc<Vec<Vec<u32>>>, length: usize, seed: u64, position: Position) -> Self {
        let order = shuffled(documents.len(), seed, position.epoch);
        Self { documents, length, seed, position, order }
    }

    /// The same documents from another position on.
    #[must_use]
    pub fn at(self, position: Position) -> Self {
        Self::new(self.documents, self.length, self.seed, position)
    }

    /// Where the next sequence begins.
    #[must_use]
    pub fn position(&self) -> Position {
        self.position
    }

    /// The next S tokens. Passes follow each other without a gap, so this never ends.
    pub fn next_sequence(&mut self) -> Sequence {
        let mut sequence = Sequence::with_capacity(self.length);
        while sequence.tokens.len() < self.length && !self.documents.is_empty() {
            let document = &self.documents[self.order[self.position.document]];
            let rest = &document[self.position.offset..];
            let take = rest.len().min(self.length - sequence.tokens.len());
            sequence.push(&rest[..take]);
            self.position.offset += take;
            if self.position.offset == document.len() {
                self.position.offset = 0;
                self.position.document += 1;
            }
            if self.position.document == self.documents.len() {
                self.position = Position { epoch: self.position.epoch + 1, ..Position::default() };
                self.order = shuffled(self.documents.len(), self.seed, self.position.epoch);
            }
        }
        sequence
    }

    /// Every document once, in the given order, as sequences of at most `length` tokens; stops after `most` tokens.
    #[must_use]
    pub fn once(documents: &[Vec<u32>], length: usize, most: usize) -> Vec<Sequence> {
        let mut sequences = vec![Sequence::with_capacity(length)];
        let mut left = most;
        for document in documents {
            let mut rest = &document[..document.len().min(left)];
            left -= rest.len();
            while !rest.is_empty() {
                if sequences.last().is_none_or(|s| s.tokens.len() == length) {
                    sequences.push(Sequence::with_capacity(length));
                }
                if let Some(sequence) = sequences.last_mut() {
                    let take = rest.len().min(length - sequence.tokens.len());
                    sequence.push(&rest[..take]);
                    rest = &rest[take..];
                }
            }
        }
        sequences.retain(|s| !s.tokens.is_empty());
        sequences
    }
}

impl Sequence {
    fn with_capacity(length: usize) -> Self {
        Self { tokens: Vec::with_capacity(length), targets: Vec::with_capacity(length), pieces: Vec::new() }
    }

    fn push(&mut self, piece: &[u32]) {
        self.tokens.extend_from_slice(piece);
        self.targets.extend_from_slice(&piece[1..]);
        self.targets.push(IGNORE);
        self.pieces.push(piece.len());
    }
}

/// Fisher and Yates, with a generator of its own per pass. Written out because its result is part of the file format: a
/// resumed run must shuffle alike under any version of any crate. The generator's stream is fixed by its specification.
fn shuffled(count: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut random = ChaCha8Rng::seed_from_u64(fingerprint([seed, epoch]));
    let mut order: Vec<usize> = (0..count).collect();
    for i in (1..count).rev() {
        // The bias of a 64-bit product over so few documents is below 2^-40.
        let j = ((u128::from(random.next_u64()) * (i as u128 + 1)) >> 64) as usize;
        order.swap(i, j);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Documents whose tokens tell where they come from.
    fn marked(lengths: &[usize]) -> Arc<Vec<Vec<u32>>> {
        Arc::new(lengths.iter().enumerate().map(|(d, &n)| (0..n).map(|i| (d * 1000 + i) as u32).collect()).collect())
    }

    proptest! {
        #[test]
        fn every_token_comes_once_a_pass_in_order_and_targets_stay_in_their_piece(
            lengths in prop::collection::vec(1usize..90, 1..12), length in 2usize..70, seed: u64,
        ) {
            let documents = marked(&lengths);
            let mut packer = Packer::new(documents.clone(), length, seed, Position::default());
            let mut seen = vec![0usize; lengths.len()];
            while packer.position().epoch == 0 {
                let sequence = packer.next_sequence();
                prop_assert_eq!(sequence.tokens.len(), length);
                prop_assert_eq!(sequence.pieces.iter().sum::<usize>(), length);
                let mut at = 0;
                for &piece in &sequence.pieces {
                    let tokens = &sequence.tokens[at..at + piece];
                    prop_assert!(piece > 0 && tokens.windows(2).all(|w| w[1] == w[0] + 1), "a piece is one document's");
                    prop_assert_eq!(&sequence.targets[at..at + piece - 1], &tokens[1..]);
                    prop_assert_eq!(sequence.targets[at + piece - 1], IGNORE);
                    let (document, offset) = (tokens[0] as usize / 1000, tokens[0] as usize % 1000);
                    // Once all is dealt, what follows in this sequence is the next pass.
                    if seen != lengths {
                        prop_assert_eq!(seen[document], offset);
                        seen[document] += piece;
                    }
                    at += piece;
                }
            }
            prop_assert_eq!(seen, lengths);
        }

        #[test]
        fn a_packer_at_a_saved_position_deals_the_same_sequences(
            lengths in prop::collection::vec(1usize..90, 1..12), length in 2usize..70, seed: u64, before in 0usize..9,
        ) {
            let documents = marked(&lengths);
            let mut packer = Packer::new(documents.clone(), length, seed, Position::default());
            for _ in 0..before { packer.next_sequence(); }
            let saved = serde_json::to_string(&packer.position()).unwrap();
            let mut again = Packer::new(documents, length, seed, serde_json::from_str(&saved).unwrap());
            for _ in 0..5 { prop_assert_eq!(again.next_sequence(), packer.next_sequence()); }
            prop_assert_eq!(again.position(), packer.position());
        }

        #[test]
        fn once_deals_every_token_once(lengths in prop::collection::vec(1usize..90, 1..12), length in 2usize..70) {
            let documents = marked(&lengths);
            let sequences = Packer::once(&documents, length, usize::MAX);
            let tokens: Vec<u32> = sequences.iter().flat_map(|s| s.tokens.clone()).collect();
            prop_assert_eq!(tokens, documents.concat());
            prop_assert!(sequences.iter().rev().skip(1).all(|s| s.tokens.len() == length));
            let few = Packer::once(&documents, length, 3);
            prop_assert_eq!(few.iter().map(|s| s.tokens.len()).sum::<usize>(), 3.min(lengths.iter().sum()));
        }
    }

    #[test]
    fn the_order_changes_with_the_pass_and_with_the_seed_and_never_with_the_version() {
        assert_ne!(shuffled(50, 1, 0), shuffled(50, 1, 1));
        assert_ne!(shuffled(50, 1, 0), shuffled(50, 2, 0));
        let mut sorted = shuffled(50, 1, 0);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<_>>());
    }
}
