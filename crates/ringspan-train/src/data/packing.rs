//! Documents to sequences of exactly S tokens, without padding and without a document seeing another.

use super::{IGNORE, Store, balance, encode::GIVEN, fingerprint};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use serde::{Deserialize, Serialize};
use std::str::FromStr;

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

/// How the documents of a step become its sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Packing {
    /// One sequence after the other, in the order of the documents.
    #[default]
    InOrder,
    /// The same tokens dealt so that each sequence has about as many pairs of a query and a key that it sees.
    Balanced,
}

impl FromStr for Packing {
    type Err = ringspan::Error;

    fn from_str(given: &str) -> Result<Self, Self::Err> {
        match given {
            "in-order" => Ok(Self::InOrder),
            "balanced" => Ok(Self::Balanced),
            _ => Err(ringspan::Error::Unknown { what: "packing", given: given.into(), possible: "in-order, balanced" }),
        }
    }
}

/// A stretch of one document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) document: usize,
    pub(super) start: usize,
    pub(super) len: usize,
}

/// One sequence: pieces of documents, end to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// S tokens (fewer only at the end of an evaluation).
    pub tokens: Vec<u32>,
    /// For each token the one that follows it in its piece; [`IGNORE`] for the last of a piece, and where what follows is
    /// given, not learned.
    pub targets: Vec<u32>,
    /// Lengths of the pieces, in order; their sum is the number of tokens.
    pub pieces: Vec<usize>,
}

/// Deals out documents as sequences, shuffled anew each pass. A document longer than what is left of a sequence goes on
/// in the next one as a new piece.
#[derive(Debug, Clone)]
pub struct Packer {
    documents: Store,
    length: usize,
    seed: u64,
    packing: Packing,
    position: Position,
    order: Vec<usize>,
}

impl Packer {
    /// A packer at `position` of `documents`, for sequences of `length` tokens, in order.
    #[must_use]
    pub fn new(documents: Store, length: usize, seed: u64, position: Position) -> Self {
        let order = shuffled(documents.len(), seed, position.epoch);
        Self { documents, length, seed, packing: Packing::InOrder, position, order }
    }

    /// The same documents packed in another way.
    #[must_use]
    pub fn with(self, packing: Packing) -> Self {
        Self { packing, ..self }
    }

    /// The same documents in another place.
    pub(crate) fn over(self, documents: Store) -> Self {
        Self { documents, ..self }
    }

    /// The same documents from another position on.
    #[must_use]
    pub fn at(self, position: Position) -> Self {
        Self::new(self.documents, self.length, self.seed, position).with(self.packing)
    }

    /// Where the next sequence begins.
    #[must_use]
    pub fn position(&self) -> Position {
        self.position
    }

    /// The next `count` sequences of S tokens: those of a step, which [`Packing::Balanced`] deals among themselves. Passes
    /// follow each other without a gap, so this never ends.
    pub fn next_sequences(&mut self, count: usize) -> Vec<Sequence> {
        let dealt = match self.packing {
            Packing::InOrder => (0..count).map(|_| self.next_spans(self.length)).collect(),
            Packing::Balanced => balance::deal(self.next_spans(self.length * count), self.length, count),
        };
        let sequence = |spans: &Vec<Span>| {
            let mut sequence = Sequence::with_capacity(self.length);
            for span in spans {
                sequence.push(&self.documents.document(span.document)[span.start..span.start + span.len]);
            }
            sequence
        };
        dealt.iter().map(sequence).collect()
    }

    /// The next `tokens` tokens, in spans of at most S.
    fn next_spans(&mut self, tokens: usize) -> Vec<Span> {
        let (mut spans, mut left) = (Vec::new(), tokens);
        while left > 0 && !self.documents.is_empty() {
            let document = self.order[self.position.document];
            let (start, whole) = (self.position.offset, self.documents.document(document).len());
            let len = (whole - start).min(left).min(self.length);
            spans.push(Span { document, start, len });
            left -= len;
            self.position.offset += len;
            if self.position.offset == whole {
                self.position.offset = 0;
                self.position.document += 1;
            }
            if self.position.document == self.documents.len() {
                self.position = Position { epoch: self.position.epoch + 1, ..Position::default() };
                self.order = shuffled(self.documents.len(), self.seed, self.position.epoch);
            }
        }
        spans
    }

    /// Every document once, in the given order, as sequences of at most `length` tokens; stops after `most` tokens.
    #[must_use]
    pub fn once(documents: &Store, length: usize, most: usize) -> Vec<Sequence> {
        let mut sequences = vec![Sequence::with_capacity(length)];
        let mut left = most;
        for document in documents.documents() {
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
        self.tokens.extend(piece.iter().map(|word| word & !GIVEN));
        self.targets.extend(piece[1..].iter().map(|&word| if word & GIVEN == 0 { word } else { IGNORE }));
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
    fn marked(lengths: &[usize]) -> Store {
        let document = |(d, &n): (usize, &usize)| (0..n).map(|i| (d * 1000 + i) as u32).collect();
        Store::new(&lengths.iter().enumerate().map(document).collect::<Vec<Vec<u32>>>())
    }

    fn next(packer: &mut Packer) -> Sequence {
        packer.next_sequences(1).remove(0)
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
                let sequence = next(&mut packer);
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
            count in 1usize..4, balanced: bool,
        ) {
            let documents = marked(&lengths);
            let packing = if balanced { Packing::Balanced } else { Packing::InOrder };
            let mut packer = Packer::new(documents.clone(), length, seed, Position::default()).with(packing);
            for _ in 0..before { packer.next_sequences(count); }
            let saved = serde_json::to_string(&packer.position()).unwrap();
            let mut again = Packer::new(documents, length, seed, serde_json::from_str(&saved).unwrap()).with(packing);
            for _ in 0..5 { prop_assert_eq!(again.next_sequences(count), packer.next_sequences(count)); }
            prop_assert_eq!(again.position(), packer.position());
        }

        #[test]
        fn once_deals_every_token_once(lengths in prop::collection::vec(1usize..90, 1..12), length in 2usize..70) {
            let documents = marked(&lengths);
            let sequences = Packer::once(&documents, length, usize::MAX);
            let tokens: Vec<u32> = sequences.iter().flat_map(|s| s.tokens.clone()).collect();
            prop_assert_eq!(tokens, documents.documents().collect::<Vec<_>>().concat());
            prop_assert!(sequences.iter().rev().skip(1).all(|s| s.tokens.len() == length));
            let few = Packer::once(&documents, length, 3);
            prop_assert_eq!(few.iter().map(|s| s.tokens.len()).sum::<usize>(), 3.min(lengths.iter().sum()));
        }
    }

    #[test]
    fn a_token_that_is_given_is_read_but_no_target() {
        let documents = Store::new(&[vec![1 | GIVEN, 2 | GIVEN, 3, 4 | GIVEN, 5]]);
        let [sequence] = &Packer::once(&documents, 8, usize::MAX)[..] else { panic!("one sequence") };
        assert_eq!(sequence.tokens, [1, 2, 3, 4, 5]);
        assert_eq!(sequence.targets, [IGNORE, 3, IGNORE, 5, IGNORE]);
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
