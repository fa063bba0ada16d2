//! Packs documents into sequences of S tokens, in which no document sees another. Text fills sequences to the last token;
//! documents that must stay whole leave padding at their ends.

use super::{Fit, IGNORE, Store, balance, best_fit, encode::GIVEN, fingerprint};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use serde::{Deserialize, Serialize};
use std::{str::FromStr, sync::Arc};

/// The packer's position. With the documents, the sequence length and the seed it fixes all sequences that follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Number of full passes over the documents so far.
    pub epoch: u64,
    /// Number of documents of this pass that are done; number of sequences, where no document is cut.
    pub document: usize,
    /// Number of tokens of the next document that are done.
    pub offset: usize,
}

/// How the documents of a step are dealt to its sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Packing {
    /// One sequence after the other, in the order of the documents.
    #[default]
    InOrder,
    /// The same documents dealt so that each sequence has about as many visible query-key pairs.
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
    /// For each token the one that follows it in its piece; [`IGNORE`] for the last token of a piece, and where the next one is
    /// given, not learned.
    pub targets: Vec<u32>,
    /// Lengths of the pieces, in order; their sum is the number of tokens.
    pub pieces: Vec<usize>,
}

/// Packs documents into sequences, shuffled anew in each pass. Text longer than the room in a sequence goes on in the next one as
/// a new piece; documents that must stay whole go where they fit best.
#[derive(Debug, Clone)]
pub struct Packer {
    documents: Store,
    fit: Fit,
    length: usize,
    seed: u64,
    packing: Packing,
    position: Position,
    pass: Arc<Pass>,
}

/// The order of a pass over the documents, as indices of their spans.
#[derive(Debug)]
enum Pass {
    /// One span after the other, cut where a sequence ends.
    Stream(Vec<u32>),
    /// The whole spans of each sequence.
    Whole(Vec<Vec<u32>>),
}

impl Pass {
    fn new(fit: &Fit, length: usize, seed: u64, epoch: u64) -> Arc<Self> {
        let order = shuffled(fit.spans.len(), seed, epoch);
        if !fit.whole {
            return Arc::new(Self::Stream(order));
        }
        // The whole pass is packed at once: so a position in it is one number, and no sequence waits for the next documents.
        let mut sequences = best_fit::pack(&order, |span| fit.spans.get(span as usize).len, length);
        let places = shuffled(sequences.len(), fingerprint([seed, 1]), epoch);
        Arc::new(Self::Whole(places.into_iter().map(|place| std::mem::take(&mut sequences[place as usize])).collect()))
    }

    fn len(&self) -> usize {
        match self {
            Self::Stream(order) => order.len(),
            Self::Whole(sequences) => sequences.len(),
        }
    }
}

impl Packer {
    /// A packer of `documents` from `position` on, for sequences of `length` tokens, in order, of text that may be cut anywhere.
    #[must_use]
    pub fn new(documents: Store, length: usize, seed: u64, position: Position) -> Self {
        let fit = Fit::text(&documents);
        let pass = Pass::new(&fit, length, seed, position.epoch);
        Self { documents, fit, length, seed, packing: Packing::InOrder, position, pass }
    }

    /// This packer with another way of packing.
    #[must_use]
    pub fn with(self, packing: Packing) -> Self {
        Self { packing, ..self }
    }

    /// This packer with the spans of `fit`, which was made for its documents and sequence length.
    #[must_use]
    pub fn fitted(self, fit: Fit) -> Self {
        let pass = Pass::new(&fit, self.length, self.seed, self.position.epoch);
        Self { fit, pass, ..self }
    }

    /// This packer, continued from another position.
    #[must_use]
    pub fn at(self, position: Position) -> Self {
        let pass = Pass::new(&self.fit, self.length, self.seed, position.epoch);
        Self { position, pass, ..self }
    }

    /// The position at which the next sequence begins.
    #[must_use]
    pub fn position(&self) -> Position {
        self.position
    }

    /// The next `count` sequences, of S tokens each, or of fewer where documents stay whole. They make up a step, in which
    /// [`Packing::Balanced`] deals documents anew. Passes follow each other without a gap, so this never ends.
    pub fn next_sequences(&mut self, count: usize) -> Vec<Sequence> {
        let dealt = match (self.packing, self.fit.whole) {
            (Packing::InOrder, false) => (0..count).map(|_| self.next_spans(self.length)).collect(),
            (Packing::Balanced, false) => balance::deal(self.next_spans(self.length * count), self.length, count),
            (Packing::InOrder, true) => self.next_whole(count),
            (Packing::Balanced, true) => balance::deal_whole(self.next_whole(count), self.length),
        };
        dealt.iter().map(|spans| self.sequence(spans)).collect()
    }

    /// The `count` fullest sequences of a pass, where documents stay whole; none where every sequence is full.
    pub(crate) fn fullest(&self, count: usize) -> Option<Vec<Sequence>> {
        let Pass::Whole(sequences) = &*self.pass else { return None };
        let span = |&span: &u32| self.fit.spans.get(span as usize);
        let tokens = |sequence: &&Vec<u32>| sequence.iter().map(|at| span(at).len).sum::<usize>();
        let mut all: Vec<&Vec<u32>> = sequences.iter().collect();
        all.sort_by_key(|sequence| std::cmp::Reverse(tokens(sequence)));
        let spans = |sequence: &Vec<u32>| sequence.iter().map(span).collect::<Vec<_>>();
        Some(all.into_iter().cycle().take(count).map(|sequence| self.sequence(&spans(sequence))).collect())
    }

    /// Number of sequences that a pass fills; a fraction for text, whose last sequence the next pass fills up.
    #[must_use]
    pub fn sequences_of_pass(&self) -> f64 {
        match &*self.pass {
            Pass::Stream(_) => self.fit.spans.tokens() as f64 / self.length as f64,
            Pass::Whole(sequences) => sequences.len() as f64,
        }
    }

    fn sequence(&self, spans: &[Span]) -> Sequence {
        let mut sequence = Sequence::with_capacity(self.length);
        for span in spans {
            sequence.push(&self.documents.document(span.document)[span.start..span.start + span.len]);
        }
        sequence
    }

    /// The next `tokens` tokens, in spans of at most S.
    fn next_spans(&mut self, tokens: usize) -> Vec<Span> {
        let (mut spans, mut left) = (Vec::new(), tokens);
        while left > 0
            && let Pass::Stream(order) = &*self.pass
            && let Some(&next) = order.get(self.position.document)
        {
            let Span { document, start, len: whole } = self.fit.spans.get(next as usize);
            let offset = self.position.offset;
            let len = (whole - offset).min(left).min(self.length);
            spans.push(Span { document, start: start + offset, len });
            left -= len;
            self.position.offset += len;
            if self.position.offset == whole {
                self.position.offset = 0;
                self.advance();
            }
        }
        spans
    }

    /// The spans of the next `count` sequences of whole documents.
    fn next_whole(&mut self, count: usize) -> Vec<Vec<Span>> {
        let mut dealt = Vec::with_capacity(count);
        while dealt.len() < count
            && let Pass::Whole(sequences) = &*self.pass
            && let Some(sequence) = sequences.get(self.position.document)
        {
            dealt.push(sequence.iter().map(|&span| self.fit.spans.get(span as usize)).collect());
            self.advance();
        }
        dealt
    }

    fn advance(&mut self) {
        self.position.document += 1;
        if self.position.document == self.pass.len() {
            self.position = Position { epoch: self.position.epoch + 1, ..Position::default() };
            self.pass = Pass::new(&self.fit, self.length, self.seed, self.position.epoch);
        }
    }

    /// The spans of `fit` once, in the order of the documents, as sequences of at most `length` tokens, for evaluation. Stops
    /// after `most` tokens, or with the first document if that must stay whole and is longer.
    #[must_use]
    pub fn once(documents: &Store, fit: &Fit, length: usize, most: usize) -> Vec<Sequence> {
        let mut sequences = vec![Sequence::with_capacity(length)];
        let mut left = most;
        for span in fit.spans.iter() {
            if fit.whole && span.len > left && left < most {
                break;
            }
            let len = if fit.whole { span.len } else { span.len.min(left) };
            left = left.saturating_sub(len);
            let mut rest = &documents.document(span.document)[span.start..span.start + len];
            while !rest.is_empty() {
                // Number of tokens that must go into one sequence together.
                let least = if fit.whole { rest.len() } else { 1 };
                if sequences.last().is_none_or(|s| s.tokens.len() + least > length) {
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

/// Shuffles 0..count as Fisher and Yates, with a generator of its own per pass. It is written out because checkpoints depend on
/// the result: a resumed run must shuffle alike under any version of any crate. The generator's stream is fixed by its
/// specification.
fn shuffled(count: usize, seed: u64, epoch: u64) -> Vec<u32> {
    let mut random = ChaCha8Rng::seed_from_u64(fingerprint([seed, epoch]));
    // A token file has no more documents than fit into a u32.
    let mut order: Vec<u32> = (0..count as u32).collect();
    for i in (1..count).rev() {
        // The bias of a 64-bit product over a u32 range is below 2^-32.
        let j = ((u128::from(random.next_u64()) * (i as u128 + 1)) >> 64) as usize;
        order.swap(i, j);
    }
    order
}

#[cfg(test)]
mod test;
