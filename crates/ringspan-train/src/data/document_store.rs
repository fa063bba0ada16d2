//! Stores tokenized documents, in memory or in a mapped file.

use memmap2::Mmap;
use std::{ops::Range, sync::Arc};

/// Documents as masked tokens, none of them empty. Clones share the masked tokens.
#[derive(Debug, Clone)]
pub struct DocumentStore {
    masked_tokens: Arc<TokenStorage>,
    tokens: usize,
}

#[derive(Debug)]
enum TokenStorage {
    Owned {
        masked_tokens: Vec<u32>,
        /// Indices of each document's first masked token, and of the one after its last.
        ranges: Vec<[u64; 2]>,
    },
    /// A mapped file, and its bytes in which the masked tokens and the documents' ranges lie.
    Mapped { file: Arc<Mmap>, masked_tokens: Range<usize>, ranges: Range<usize> },
}

impl TokenStorage {
    fn all(&self) -> &[u32] {
        match self {
            Self::Owned { masked_tokens, .. } => masked_tokens,
            // The cast does not fail: when the file was opened it was checked, and masked tokens begin at a multiple of 4 bytes.
            Self::Mapped { file, masked_tokens, .. } => {
                bytemuck::try_cast_slice(&file[masked_tokens.clone()]).unwrap_or_default()
            }
        }
    }

    fn ranges(&self) -> &[[u64; 2]] {
        match self {
            Self::Owned { ranges, .. } => ranges,
            // The cast does not fail: ranges begin at a multiple of 8 bytes.
            Self::Mapped { file, ranges, .. } => bytemuck::try_cast_slice(&file[ranges.clone()]).unwrap_or_default(),
        }
    }
}

impl DocumentStore {
    /// A store of `documents` in memory, without the empty ones.
    #[must_use]
    pub fn new(documents: &[Vec<u32>]) -> Self {
        let range = |end: &mut u64, document: &Vec<u32>| {
            let start = *end;
            *end += document.len() as u64;
            Some([start, *end])
        };
        let ranges = documents.iter().filter(|document| !document.is_empty()).scan(0, range).collect();
        let masked_tokens = documents.concat();
        Self { tokens: masked_tokens.len(), masked_tokens: Arc::new(TokenStorage::Owned { masked_tokens, ranges }) }
    }

    /// The documents of a file that was checked: the bytes of its masked tokens, and the bytes of these documents' ranges. The documents
    /// have `tokens` masked tokens together.
    pub(super) fn mapped(file: Arc<Mmap>, masked_tokens: Range<usize>, ranges: Range<usize>, tokens: usize) -> Self {
        Self { masked_tokens: Arc::new(TokenStorage::Mapped { file, masked_tokens, ranges }), tokens }
    }

    /// Number of documents.
    #[must_use]
    pub fn len(&self) -> usize {
        self.masked_tokens.ranges().len()
    }

    /// Whether there is no document.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.masked_tokens.ranges().is_empty()
    }

    /// Number of masked tokens in a document. `index` is below [`len`](Self::len).
    #[must_use]
    pub fn document_len(&self, index: usize) -> usize {
        let [start, end] = self.masked_tokens.ranges()[index];
        (end - start) as usize
    }

    /// The masked tokens of a document: tokens, with the highest bit set where the loss leaves the token out. `index` is below
    /// [`len`](Self::len).
    #[must_use]
    pub fn document(&self, index: usize) -> &[u32] {
        let [start, end] = self.masked_tokens.ranges()[index];
        &self.masked_tokens.all()[start as usize..end as usize]
    }

    /// All documents, in order.
    pub fn documents(&self) -> impl Iterator<Item = &[u32]> {
        (0..self.len()).map(|index| self.document(index))
    }

    /// Number of tokens in all documents.
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
        let store = DocumentStore::new(&[vec![1, 2], vec![], vec![3]]);
        assert_eq!((store.len(), store.tokens(), store.is_empty()), (2, 3, false));
        assert_eq!(store.documents().collect::<Vec<_>>(), [&[1, 2][..], &[3]]);
        assert_eq!((store.document_len(0), store.document_len(1)), (2, 1));
        assert_eq!((DocumentStore::new(&[]).len(), DocumentStore::new(&[]).tokens()), (0, 0));
    }
}
