//! Decides which spans of each document are packed: all of it, or less if it is longer than a sequence.

use super::{DocumentStore, encode::NOT_LEARNED, sequence::Span};
use crate::human_readable::grouped;
use std::{fmt, str::FromStr, sync::Arc};

/// How a document that is longer than a sequence is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overlong {
    /// The document goes on in another sequence, which does not see its beginning.
    Split,
    /// The document's end is left out.
    Truncate,
    /// The document is left out.
    Drop,
}

impl FromStr for Overlong {
    type Err = ringspan::Error;

    fn from_str(given: &str) -> Result<Self, Self::Err> {
        match given {
            "split" => Ok(Self::Split),
            "truncate" => Ok(Self::Truncate),
            "drop" => Ok(Self::Drop),
            _ => Err(ringspan::Error::Unknown {
                what: "overlong",
                given: given.into(),
                possible: "split, truncate, drop",
            }),
        }
    }
}

/// The spans of documents that are packed, in order.
#[derive(Debug, Clone)]
pub(super) enum Spans {
    /// Every document as a whole. There may be many, so no list of them is kept.
    Documents(DocumentStore),
    Listed(Arc<Vec<Span>>),
}

impl Spans {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Documents(store) => store.len(),
            Self::Listed(spans) => spans.len(),
        }
    }

    /// The span at `index`, which is below [`len`](Self::len).
    pub(super) fn get(&self, index: usize) -> Span {
        match self {
            Self::Documents(store) => Span { document: index, start: 0, len: store.document_len(index) },
            Self::Listed(spans) => spans[index],
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Span> {
        (0..self.len()).map(|index| self.get(index))
    }

    pub(super) fn tokens(&self) -> usize {
        match self {
            Self::Documents(store) => store.tokens(),
            Self::Listed(spans) => spans.iter().map(|span| span.len).sum(),
        }
    }
}

/// The spans of documents that are packed, and what is lost of documents that are too long.
#[derive(Debug, Clone)]
pub struct PackableSpans {
    pub(super) spans: Spans,
    /// Whether a span always lies in one sequence, as conversations and completions must: an answer without its question
    /// teaches nothing. Other text is cut where a sequence ends.
    pub(super) keeps_whole: bool,
    overlong: Overlong,
    length: usize,
    /// Number of documents longer than a sequence.
    overlong_documents: usize,
    /// Number of tokens that are never seen.
    lost_tokens: usize,
    /// Number of tokens that would be learned if no document were too long.
    unlearned: u64,
    /// Number of parts that are left out because nothing in them is learned.
    parts_without_targets: usize,
}

impl PackableSpans {
    /// Fits documents to sequences of `length` tokens; `whole` ones are cut only where they are longer than that.
    #[must_use]
    pub fn new(documents: &DocumentStore, length: usize, keeps_whole: bool, overlong: Overlong) -> Self {
        let spans = Spans::Documents(documents.clone());
        let mut packable = Self {
            spans,
            keeps_whole,
            overlong,
            length,
            overlong_documents: 0,
            lost_tokens: 0,
            unlearned: 0,
            parts_without_targets: 0,
        };
        packable.overlong_documents =
            (0..documents.len()).filter(|&index| documents.document_len(index) > length).count();
        if packable.overlong_documents == 0 || overlong == Overlong::Split && !keeps_whole {
            return packable;
        }
        let mut spans = Vec::with_capacity(documents.len());
        for document in 0..documents.len() {
            let len = documents.document_len(document);
            match len <= length {
                true => spans.push(Span { document, start: 0, len }),
                false => packable.split_document(document, documents.document(document), &mut spans),
            }
        }
        packable.spans = Spans::Listed(Arc::new(spans));
        packable
    }

    /// Adds the parts of a document that is too long to `spans`.
    fn split_document(&mut self, document: usize, masked_tokens: &[u32], spans: &mut Vec<Span>) {
        let (len, length) = (masked_tokens.len(), self.length);
        let parts = match self.overlong {
            Overlong::Split => (0..len).step_by(length).map(|start| (start, length.min(len - start))).collect(),
            Overlong::Truncate => vec![(0, length)],
            Overlong::Drop => Vec::new(),
        };
        self.lost_tokens += len - parts.iter().map(|(_, len)| len).sum::<usize>();
        self.unlearned += learned_count(masked_tokens);
        for (start, len) in parts {
            let learned = learned_count(&masked_tokens[start..start + len]);
            match learned > 0 || !self.keeps_whole {
                true => spans.push(Span { document, start, len }),
                false => {
                    (self.parts_without_targets, self.lost_tokens) =
                        (self.parts_without_targets + 1, self.lost_tokens + len)
                }
            }
            self.unlearned -= learned;
        }
    }

    /// Fits text: every document is packed as a whole, and cut where a sequence ends.
    #[must_use]
    pub fn for_text(documents: &DocumentStore) -> Self {
        Self::new(documents, usize::MAX, false, Overlong::Split)
    }

    /// Whether nothing is left to pack.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.spans.len() == 0
    }

    /// Numbers of tokens that are never seen, and that are not learned, because documents are too long.
    #[must_use]
    pub fn lost_token_counts(&self) -> (u64, u64) {
        (self.lost_tokens as u64, self.unlearned)
    }

    /// The numbers by which this changes a run's data, for its fingerprint; none for text that is cut anywhere.
    pub(crate) fn identity(&self) -> Option<[u64; 3]> {
        let is_text = !self.keeps_whole && self.overlong == Overlong::Split;
        (!is_text).then_some([u64::from(self.keeps_whole), self.overlong as u64, self.length as u64])
    }
}

/// Number of learned masked tokens in a span: its first masked token is never a target.
fn learned_count(masked_tokens: &[u32]) -> u64 {
    masked_tokens.iter().skip(1).filter(|&&token| token & NOT_LEARNED == 0).count() as u64
}

impl fmt::Display for PackableSpans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cut =
            if self.keeps_whole { "no document is cut by another" } else { "documents are cut where a sequence ends" };
        write!(f, "{cut}")?;
        if self.overlong_documents == 0 {
            return Ok(());
        }
        let treatment = match self.overlong {
            Overlong::Split => "split",
            Overlong::Truncate => "truncated",
            Overlong::Drop => "left out",
        };
        let (long, length) = (grouped(self.overlong_documents as u64), grouped(self.length as u64));
        write!(f, "; {long} longer than {length} tokens are {treatment}")?;
        if self.parts_without_targets > 0 {
            write!(
                f,
                ", {} parts of them left out, where nothing is learned",
                grouped(self.parts_without_targets as u64)
            )?;
        }
        match self.lost_tokens {
            0 => Ok(()),
            lost => write!(f, " ({} tokens are never seen)", grouped(lost as u64)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(packable: &PackableSpans) -> Vec<(usize, usize, usize)> {
        packable.spans.iter().map(|span| (span.document, span.start, span.len)).collect()
    }

    #[test]
    fn long_documents_are_split_truncated_or_left_out_and_counted() {
        // The second document is a question of six tokens with its answer of four.
        let question = (0..10).map(|i| if i < 6 { i | NOT_LEARNED } else { i }).collect();
        let documents = DocumentStore::new(&[vec![1; 4], question, vec![2; 3]]);
        let packable = |whole, overlong| PackableSpans::new(&documents, 4, whole, overlong);
        assert_eq!(spans(&packable(false, Overlong::Split)), [(0, 0, 4), (1, 0, 10), (2, 0, 3)]);
        let truncated = packable(false, Overlong::Truncate);
        assert_eq!(spans(&truncated), [(0, 0, 4), (1, 0, 4), (2, 0, 3)]);
        assert!(truncated.to_string().ends_with("1 longer than 4 tokens are truncated (6 tokens are never seen)"));
        assert_eq!(spans(&packable(true, Overlong::Drop)), [(0, 0, 4), (2, 0, 3)]);
        let split = packable(true, Overlong::Split);
        assert_eq!(spans(&split), [(0, 0, 4), (1, 4, 4), (1, 8, 2), (2, 0, 3)]);
        let words = split.to_string();
        assert!(words.contains("1 longer than 4 tokens are split, 1 parts of them left out"), "{words}");
        // Truncation leaves nothing of the answer.
        let truncated_whole = packable(true, Overlong::Truncate);
        assert_eq!(spans(&truncated_whole), [(0, 0, 4), (2, 0, 3)]);
        assert!(truncated_whole.to_string().contains("(10 tokens are never seen)"), "{truncated_whole}");
        // 3, 4 and 2 tokens are learned; a part that begins with an answer loses the first one.
        assert_eq!(truncated.lost_token_counts(), (6, 4));
        assert_eq!(split.lost_token_counts(), (4, 1));
        assert_eq!(truncated_whole.lost_token_counts(), (10, 4));
        assert_eq!(packable(false, Overlong::Split).lost_token_counts(), (0, 0));
    }
}
