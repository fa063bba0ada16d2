//! Documents as words, in memory or in a mapped file.

use memmap2::Mmap;
use std::{ops::Range, sync::Arc};

/// Documents, none of them empty. Copies share the words.
#[derive(Debug, Clone)]
pub struct Store {
    words: Arc<Words>,
    tokens: usize,
}

#[derive(Debug)]
enum Words {
    Owned {
        words: Vec<u32>,
        /// First word of each document, and behind its last.
        ranges: Vec<[u64; 2]>,
    },
    /// A file, and the bytes of it in which words, and the ranges of documents, lie.
    Mapped { file: Arc<Mmap>, words: Range<usize>, ranges: Range<usize> },
}

impl Words {
    fn all(&self) -> &[u32] {
        match self {
            Self::Owned { words, .. } => words,
            // The file was checked when it was opened: the words begin at a multiple of 4.
            Self::Mapped { file, words, .. } => bytemuck::try_cast_slice(&file[words.clone()]).unwrap_or_default(),
        }
    }

    fn ranges(&self) -> &[[u64; 2]] {
        match self {
            Self::Owned { ranges, .. } => ranges,
            // And the ranges at a multiple of 8.
            Self::Mapped { file, ranges, .. } => bytemuck::try_cast_slice(&file[ranges.clone()]).unwrap_or_default(),
        }
    }
}

impl Store {
    /// `documents`, of which the empty ones are left out.
    #[must_use]
    pub fn new(documents: &[Vec<u32>]) -> Self {
        let range = |end: &mut u64, document: &Vec<u32>| {
            let start = *end;
            *end += document.len() as u64;
            Some([start, *end])
        };
        let ranges = documents.iter().filter(|document| !document.is_empty()).scan(0, range).collect();
        let words = documents.concat();
        Self { tokens: words.len(), words: Arc::new(Words::Owned { words, ranges }) }
    }

    /// The documents of a file that was checked: the bytes of its words, and those of the ranges of the documents among them,
    /// which have `tokens` words.
    pub(super) fn mapped(file: Arc<Mmap>, words: Range<usize>, ranges: Range<usize>, tokens: usize) -> Self {
        Self { words: Arc::new(Words::Mapped { file, words, ranges }), tokens }
    }

    /// Documents.
    #[must_use]
    pub fn len(&self) -> usize {
        self.words.ranges().len()
    }

    /// Whether there is no document.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.ranges().is_empty()
    }

    /// Words of a document. `index` is below [`len`](Self::len).
    #[must_use]
    pub fn document_len(&self, index: usize) -> usize {
        let [start, end] = self.words.ranges()[index];
        (end - start) as usize
    }

    /// The words of a document: tokens, with the highest bit set where the token is given, not learned. `index` is below
    /// [`len`](Self::len).
    #[must_use]
    pub fn document(&self, index: usize) -> &[u32] {
        let [start, end] = self.words.ranges()[index];
        &self.words.all()[start as usize..end as usize]
    }

    /// All documents, in order.
    pub fn documents(&self) -> impl Iterator<Item = &[u32]> {
        (0..self.len()).map(|index| self.document(index))
    }

    /// Tokens of all documents.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_come_back_as_they_were() {
        let store = Store::new(&[vec![1, 2], vec![], vec![3]]);
        assert_eq!((store.len(), store.tokens(), store.is_empty()), (2, 3, false));
        assert_eq!(store.documents().collect::<Vec<_>>(), [&[1, 2][..], &[3]]);
        assert_eq!((store.document_len(0), store.document_len(1)), (2, 1));
        assert_eq!((Store::new(&[]).len(), Store::new(&[]).tokens()), (0, 0));
    }
}
