//! Documents to sequences of S tokens, without a document seeing another. Text fills them to the last token; what must
//! stay whole leaves padding at their ends.

use super::{Fit, IGNORE, Store, balance, best_fit, encode::GIVEN, fingerprint};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use serde::{Deserialize, Serialize};
use std::{str::FromStr, sync::Arc};

/// Where the packer stands. With the documents, the sequence length and the seed it fixes everything that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Full passes over the documents so far.
    pub epoch: u64,
    /// Documents of this pass that are done; sequences, where no document is cut.
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
    /// The same documents dealt so that each sequence has about as many pairs of a query and a key that it sees.
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

/// Deals out documents as sequences, shuffled anew each pass. Text longer than what is left of a sequence goes on in the
/// next one as a new piece; what is to stay whole goes where it fits best.
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

/// A pass over the documents, by the indices of their spans.
#[derive(Debug)]
enum Pass {
    /// One after the other.
    Stream(Vec<u32>),
    /// Sequence by sequence.
    Whole(Vec<Vec<u32>>),
}

impl Pass {
    fn new(fit: &Fit, length: usize, seed: u64, epoch: u64) -> Arc<Self> {
        let order = shuffled(fit.spans.len(), seed, epoch);
        if !fit.whole {
            return Arc::new(Self::Stream(order));
        }
        // The whole pass at once: so its place is one number, and no sequence waits for the next documents.
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
    /// A packer at `position` of `documents`, for sequences of `length` tokens, in order, of text that may be cut anywhere.
    #[must_use]
    pub fn new(documents: Store, length: usize, seed: u64, position: Position) -> Self {
        let fit = Fit::text(&documents);
        let pass = Pass::new(&fit, length, seed, position.epoch);
        Self { documents, fit, length, seed, packing: Packing::InOrder, position, pass }
    }

    /// The same documents packed in another way.
    #[must_use]
    pub fn with(self, packing: Packing) -> Self {
        Self { packing, ..self }
    }

    /// The same documents, of which is packed what `fit`, made for their length, says.
    #[must_use]
    pub fn fitted(self, fit: Fit) -> Self {
        let pass = Pass::new(&fit, self.length, self.seed, self.position.epoch);
        Self { fit, pass, ..self }
    }

    /// The same documents from another position on.
    #[must_use]
    pub fn at(self, position: Position) -> Self {
        let pass = Pass::new(&self.fit, self.length, self.seed, position.epoch);
        Self { position, pass, ..self }
    }

    /// Where the next sequence begins.
    #[must_use]
    pub fn position(&self) -> Position {
        self.position
    }

    /// The next `count` sequences of S tokens, or of fewer where documents stay whole: those of a step, which
    /// [`Packing::Balanced`] deals among themselves. Passes follow each other without a gap, so this never ends.
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

    /// Sequences that a pass fills: of text the last one not to the end.
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

    /// What `fit` says of each document once, in the given order, as sequences of at most `length` tokens; stops after
    /// `most` tokens, or with the first document if that is whole and longer.
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
                // The least that has to go into one sequence.
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

/// Fisher and Yates, with a generator of its own per pass. Written out because its result is part of the file format: a
/// resumed run must shuffle alike under any version of any crate. The generator's stream is fixed by its specification.
fn shuffled(count: usize, seed: u64, epoch: u64) -> Vec<u32> {
    let mut random = ChaCha8Rng::seed_from_u64(fingerprint([seed, epoch]));
    // A source has no more documents than that.
    let mut order: Vec<u32> = (0..count as u32).collect();
    for i in (1..count).rev() {
        // The bias of a 64-bit product over so few documents is below 2^-40.
        let j = ((u128::from(random.next_u64()) * (i as u128 + 1)) >> 64) as usize;
        order.swap(i, j);
    }
    order
}

#[cfg(test)]
mod test;
