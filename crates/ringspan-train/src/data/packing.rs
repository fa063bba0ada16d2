//! Packs documents into sequences of S tokens, in which no document sees another. Text fills sequences to the last token;
//! documents that must stay whole leave padding at their ends.

use super::{
    DocumentStore, PackableSpans, balance, best_fit,
    sequence::{Sequence, Span},
};
use crate::fingerprint::fingerprint;
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use serde::{Deserialize, Serialize};
use std::{str::FromStr, sync::Arc};

/// The packer's position. With the documents, the sequence length and the seed it fixes all sequences that follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackerPosition {
    /// Number of full passes over the documents so far.
    pub epoch: u64,
    /// Number of documents of this pass that are done; number of sequences, where no document is cut.
    pub document: usize,
    /// Number of tokens of the next document that are done.
    pub offset: usize,
}

/// How the documents of a step are assigned to its sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Packing {
    /// One sequence after the other, in the order of the documents.
    #[default]
    InOrder,
    /// The same documents, assigned so that each sequence has about as many visible query-key pairs.
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

/// Packs documents into sequences, shuffled anew in each pass. Text longer than the room in a sequence goes on in the next one as
/// a new segment; documents that must stay whole go where they fit best.
#[derive(Debug, Clone)]
pub struct Packer {
    documents: DocumentStore,
    spans_to_pack: PackableSpans,
    length: usize,
    seed: u64,
    packing: Packing,
    position: PackerPosition,
    order: Arc<EpochOrder>,
}

/// The order of a pass over the documents, as indices of their spans.
#[derive(Debug)]
enum EpochOrder {
    /// One span after the other, cut where a sequence ends.
    Stream(Vec<u32>),
    /// The whole spans of each sequence.
    Whole(Vec<Vec<u32>>),
}

impl EpochOrder {
    fn new(spans_to_pack: &PackableSpans, length: usize, seed: u64, epoch: u64) -> Arc<Self> {
        let order = shuffled(spans_to_pack.spans.len(), seed, epoch);
        if !spans_to_pack.keeps_whole {
            return Arc::new(Self::Stream(order));
        }
        // The whole pass is packed at once: so a position in it is one number, and no sequence waits for the next documents.
        let mut sequences = best_fit::pack(&order, |span| spans_to_pack.spans.get(span as usize).len, length);
        let sequence_order = shuffled(sequences.len(), fingerprint([seed, 1]), epoch);
        Arc::new(Self::Whole(
            sequence_order.into_iter().map(|index| std::mem::take(&mut sequences[index as usize])).collect(),
        ))
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
    pub fn new(documents: DocumentStore, length: usize, seed: u64, position: PackerPosition) -> Self {
        let spans_to_pack = PackableSpans::for_text(&documents);
        let order = EpochOrder::new(&spans_to_pack, length, seed, position.epoch);
        Self { documents, spans_to_pack, length, seed, packing: Packing::InOrder, position, order }
    }

    /// This packer with another way of packing.
    #[must_use]
    pub fn with_packing(self, packing: Packing) -> Self {
        Self { packing, ..self }
    }

    /// This packer with the spans of `fit`, which was made for its documents and sequence length.
    #[must_use]
    pub fn with_spans(self, spans_to_pack: PackableSpans) -> Self {
        let order = EpochOrder::new(&spans_to_pack, self.length, self.seed, self.position.epoch);
        Self { spans_to_pack, order, ..self }
    }

    /// This packer, continued from another position.
    #[must_use]
    pub fn resume_at(self, position: PackerPosition) -> Self {
        let order = EpochOrder::new(&self.spans_to_pack, self.length, self.seed, position.epoch);
        Self { position, order, ..self }
    }

    /// The position at which the next sequence begins.
    #[must_use]
    pub fn position(&self) -> PackerPosition {
        self.position
    }

    /// The next `count` sequences, of S tokens each, or of fewer where documents stay whole. They make up a step, in which
    /// [`Packing::Balanced`] assigns documents anew. Passes follow each other without a gap, so this never ends.
    pub fn next_sequences(&mut self, count: usize) -> Vec<Sequence> {
        let sequences_of_spans = match (self.packing, self.spans_to_pack.keeps_whole) {
            (Packing::InOrder, false) => (0..count).map(|_| self.next_spans(self.length)).collect(),
            (Packing::Balanced, false) => {
                balance::balance_spans(self.next_spans(self.length * count), self.length, count)
            }
            (Packing::InOrder, true) => self.next_whole(count),
            (Packing::Balanced, true) => balance::balance_whole_spans(self.next_whole(count), self.length),
        };
        sequences_of_spans.iter().map(|spans| self.sequence(spans)).collect()
    }

    /// The `count` fullest sequences of a pass, where documents stay whole; none where every sequence is full.
    pub(crate) fn fullest_sequences(&self, count: usize) -> Option<Vec<Sequence>> {
        let EpochOrder::Whole(sequences) = &*self.order else { return None };
        let span = |&span: &u32| self.spans_to_pack.spans.get(span as usize);
        let tokens = |sequence: &&Vec<u32>| sequence.iter().map(|at| span(at).len).sum::<usize>();
        let mut all: Vec<&Vec<u32>> = sequences.iter().collect();
        all.sort_by_key(|sequence| std::cmp::Reverse(tokens(sequence)));
        let spans = |sequence: &Vec<u32>| sequence.iter().map(span).collect::<Vec<_>>();
        Some(all.into_iter().cycle().take(count).map(|sequence| self.sequence(&spans(sequence))).collect())
    }

    /// Number of sequences that a pass fills; a fraction for text, whose last sequence the next pass fills up.
    #[must_use]
    pub fn sequences_per_epoch(&self) -> f64 {
        match &*self.order {
            EpochOrder::Stream(_) => self.spans_to_pack.spans.tokens() as f64 / self.length as f64,
            EpochOrder::Whole(sequences) => sequences.len() as f64,
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
            && let EpochOrder::Stream(order) = &*self.order
            && let Some(&next) = order.get(self.position.document)
        {
            let Span { document, start, len: whole } = self.spans_to_pack.spans.get(next as usize);
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
        let mut sequences_of_spans = Vec::with_capacity(count);
        while sequences_of_spans.len() < count
            && let EpochOrder::Whole(sequences) = &*self.order
            && let Some(sequence) = sequences.get(self.position.document)
        {
            sequences_of_spans.push(sequence.iter().map(|&span| self.spans_to_pack.spans.get(span as usize)).collect());
            self.advance();
        }
        sequences_of_spans
    }

    fn advance(&mut self) {
        self.position.document += 1;
        if self.position.document == self.order.len() {
            self.position = PackerPosition { epoch: self.position.epoch + 1, ..PackerPosition::default() };
            self.order = EpochOrder::new(&self.spans_to_pack, self.length, self.seed, self.position.epoch);
        }
    }

    /// The spans of `fit` once, in the order of the documents, as sequences of at most `length` tokens, for evaluation. Stops
    /// after `most` tokens, or with the first document if that must stay whole and is longer.
    #[must_use]
    pub fn pack_once(
        documents: &DocumentStore,
        spans_to_pack: &PackableSpans,
        length: usize,
        max_tokens: usize,
    ) -> Vec<Sequence> {
        let mut sequences = vec![Sequence::with_capacity(length)];
        let mut left = max_tokens;
        for span in spans_to_pack.spans.iter() {
            if spans_to_pack.keeps_whole && span.len > left && left < max_tokens {
                break;
            }
            let len = if spans_to_pack.keeps_whole { span.len } else { span.len.min(left) };
            left = left.saturating_sub(len);
            let mut rest = &documents.document(span.document)[span.start..span.start + len];
            while !rest.is_empty() {
                // Number of tokens that must go into one sequence together.
                let min_room = if spans_to_pack.keeps_whole { rest.len() } else { 1 };
                if sequences.last().is_none_or(|s| s.tokens.len() + min_room > length) {
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
