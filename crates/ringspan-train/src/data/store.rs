//! Documents as words, end to end in one piece of memory or in a mapped file.

use memmap2::Mmap;
use std::sync::Arc;

/// Documents, none of them empty. Copies share the words.
#[derive(Debug, Clone)]
pub struct Store {
    words: Arc<Words>,
    /// First word of the first document.
    start: usize,
    /// Behind the last word of each document.
    ends: Arc<Vec<usize>>,
}

#[derive(Debug)]
pub(super) enum Words {
    Owned(Vec<u32>),
    /// A file, and the byte at which its words begin.
    Mapped(Mmap, usize),
}

impl Words {
    fn all(&self) -> &[u32] {
        match self {
            Self::Owned(words) => words,
            // The file was checked when it was opened: the words begin at a multiple of 4.
            Self::Mapped(file, from) => bytemuck::try_cast_slice(&file[*from..]).unwrap_or_default(),
        }
    }
}

impl Store {
    /// `documents`, of which the empty ones are left out.
    #[must_use]
    pub fn new(documents: &[Vec<u32>]) -> Self {
        let ends = documents.iter().filter(|document| !document.is_empty()).scan(0, |end, document| {
            *end += document.len();
            Some(*end)
        });
        let ends = ends.collect();
        Self::of(Arc::new(Words::Owned(documents.concat())), 0, ends)
    }

    /// Documents that end at `ends`, rising, the first of which begins at `start`.
    pub(super) fn of(words: Arc<Words>, start: usize, ends: Vec<usize>) -> Self {
        Self { words, start, ends: Arc::new(ends) }
    }

    /// Documents.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no document.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The words of a document: tokens, with the highest bit set where the token is given, not learned. `index` is below
    /// [`len`](Self::len).
    #[must_use]
    pub fn document(&self, index: usize) -> &[u32] {
        let start = if index == 0 { self.start } else { self.ends[index - 1] };
        &self.words.all()[start..self.ends[index]]
    }

    /// All documents, in order.
    pub fn documents(&self) -> impl Iterator<Item = &[u32]> {
        (0..self.len()).map(|index| self.document(index))
    }

    /// Tokens of all documents.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.ends.last().map_or(0, |end| end - self.start)
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
        assert_eq!((Store::new(&[]).len(), Store::new(&[]).tokens()), (0, 0));
    }
}
