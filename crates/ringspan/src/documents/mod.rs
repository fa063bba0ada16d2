//! Documents are the sequences inside a batch that never see each other; runs are some of their tokens.

mod run;
mod strand;

pub use run::Run;
pub(crate) use strand::Strand;

use crate::error::{Error, Result};
use std::ops::Range;

/// One sequence inside a batch `[B, S]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Batch row.
    pub row: usize,
    /// Index of position 0 in the flat batch (`b * S + s`).
    pub offset: usize,
    /// Positions that hold tokens, ascending; more than one span where padding or other documents lie between.
    pub spans: Vec<Range<usize>>,
    /// Sequence length of the document in positions, padding at its end included. A mask aligned to the end lets query i stand at
    /// position i + (sequence length of the keys - that of the queries) of the keys.
    pub seq_len: usize,
}

impl Document {
    /// Number of tokens, without padding.
    pub fn tokens(&self) -> usize {
        self.spans.iter().map(|span| span.len()).sum()
    }
}

/// The documents of a batch `[B, S]`. Tokens in no document are padding.
///
/// ```
/// use ringspan::Documents;
///
/// // Two rows of 6: documents of 3 and 2 tokens, then one of 4; the rest is padding.
/// let documents = Documents::from_rows(&[vec![3, 2], vec![4]], 6)?;
/// assert_eq!((documents.len(), documents.tokens(), documents.size()), (3, 9, 12));
/// assert_eq!((documents.get(1).row, documents.get(1).offset), (0, 3));
/// assert_eq!((documents.get(2).row, documents.get(2).offset), (1, 6));
/// # Ok::<_, ringspan::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Documents {
    list: Vec<Document>,
    size: usize,
    /// Elements of a batch row, padding included: S.
    row_len: usize,
    /// A description of the requested batch, if it has more elements than can be counted; [`check`](Documents::check)
    /// reports it.
    beyond: Option<String>,
}

/// Limit on the elements of a batch, so that sums and differences of a few positions cannot overflow.
const ELEMENTS: usize = usize::MAX / 16;

impl Documents {
    /// `rows` documents of `len` tokens: a batch without padding.
    ///
    /// A batch with too many elements to count is reported as an error later, by [`check`](Self::check), which layouts
    /// call.
    pub fn batch(rows: usize, len: usize) -> Self {
        match elements(rows, len) {
            Ok(size) => {
                let document = |row| whole(row, row * len, len, len);
                Self { list: (0..rows).map(document).collect(), size, row_len: len, beyond: None }
            }
            Err(_) => Self::beyond(format!("{rows} rows of {len} tokens")),
        }
    }

    /// A batch `[lengths.len(), len]` whose rows are padded on the right: row b has `lengths[b]` tokens.
    ///
    /// Positions and masks that are aligned to the end count in the padded length `len`; documents of
    /// [`from_rows`](Self::from_rows) count in their own lengths.
    ///
    /// # Errors
    /// A length above `len`, or more elements than can be counted.
    pub fn padded(lengths: &[usize], len: usize) -> Result<Self> {
        if let Some((row, given)) = lengths.iter().enumerate().find(|(_, given)| **given > len) {
            return Err(Error::Documents(format!("row {row} has length {given}, but rows hold {len} tokens")));
        }
        let size = elements(lengths.len(), len)?;
        let list = lengths.iter().enumerate().map(|(row, &tokens)| whole(row, row * len, tokens, len)).collect();
        Ok(Self { list, size, row_len: len, beyond: None })
    }

    /// One row of documents of the given lengths, one after the other, without padding.
    ///
    /// A batch with too many elements to count is reported as an error later, by [`check`](Self::check), which layouts
    /// call.
    pub fn packed(lengths: &[usize]) -> Self {
        let mut size = 0;
        let mut list = Vec::with_capacity(lengths.len());
        for &len in lengths {
            list.push(whole(0, size, len, len));
            size = size.saturating_add(len);
            if size > ELEMENTS {
                return Self::beyond(format!("{} documents with one of {len} tokens", lengths.len()));
            }
        }
        Self { list, size, row_len: size, beyond: None }
    }

    /// The last tokens of documents whose first ones are in a cache, given as numbers of tokens before and in the batch. The row
    /// holds each document in full, one after the other, with the cached tokens as padding.
    ///
    /// # Errors
    /// A row with too many elements to count.
    pub fn continued(documents: &[(usize, usize)]) -> Result<Self> {
        let (mut size, mut list) = (0usize, Vec::with_capacity(documents.len()));
        for &(before, tokens) in documents {
            let seq_len = before.saturating_add(tokens);
            let spans = if tokens > 0 { std::iter::once(before..seq_len).collect() } else { Vec::new() };
            list.push(Document { row: 0, offset: size, spans, seq_len });
            size = size.saturating_add(seq_len);
        }
        elements(1, size)?;
        Ok(Self { list, size, row_len: size, beyond: None })
    }

    /// One row of `len` tokens, document n at `boundaries[n]..boundaries[n + 1]`; tokens outside are padding.
    ///
    /// # Errors
    /// Boundaries that decrease or exceed `len`, or a row with too many elements to count.
    pub fn from_boundaries(boundaries: &[usize], len: usize) -> Result<Self> {
        elements(1, len)?;
        let mut list = Vec::new();
        for (n, pair) in boundaries.windows(2).enumerate() {
            if pair[0] > pair[1] || pair[1] > len {
                return Err(Error::Documents(format!(
                    "document {n} is {}..{}, which does not rise inside 0..{len}",
                    pair[0], pair[1]
                )));
            }
            list.push(whole(0, pair[0], pair[1] - pair[0], pair[1] - pair[0]));
        }
        Ok(Self { list, size: len, row_len: len, beyond: None })
    }

    /// Packs each row's documents, given by their lengths, from the left of a row of `len` tokens; the rest is padding.
    ///
    /// Positions count in the document's own length: a mask aligned to the end counts from its last token.
    ///
    /// # Errors
    /// A row whose documents need more than `len` tokens, or more elements than can be counted.
    pub fn from_rows(rows: &[Vec<usize>], len: usize) -> Result<Self> {
        let size = elements(rows.len(), len)?;
        let mut list = Vec::new();
        for (row, lengths) in rows.iter().enumerate() {
            let total = lengths.iter().fold(0, |sum: usize, &tokens| sum.saturating_add(tokens));
            if total > len {
                return Err(Error::Documents(format!("row {row} has {total} tokens, but rows hold {len}")));
            }
            let mut offset = row * len;
            for &tokens in lengths {
                list.push(whole(row, offset, tokens, tokens));
                offset += tokens;
            }
        }
        Ok(Self { list, size, row_len: len, beyond: None })
    }

    /// A batch `[ids.len() / len, len]`: tokens of a row with the same id are one document, 0 is padding.
    ///
    /// Positions inside a document also count the padding and the other documents between its tokens.
    ///
    /// # Errors
    /// Negative ids, or ids that do not fill rows of `len`.
    pub fn from_ids(ids: &[i32], len: usize) -> Result<Self> {
        if len == 0 || !ids.len().is_multiple_of(len) {
            if ids.is_empty() {
                return Ok(Self { list: Vec::new(), size: 0, row_len: len, beyond: None });
            }
            return Err(Error::Documents(format!("{} document ids do not fill rows of {len}", ids.len())));
        }
        let mut list: Vec<Document> = Vec::new();
        for (row, ids) in ids.chunks_exact(len).enumerate() {
            let mut seen = std::collections::HashMap::new();
            for (s, &id) in ids.iter().enumerate() {
                if id < 0 {
                    return Err(Error::Documents(format!("id {id} at [{row}, {s}] is negative; 0 is padding")));
                }
                if id == 0 {
                    continue;
                }
                let index = *seen.entry(id).or_insert_with(|| {
                    list.push(Document { row, offset: row * len + s, spans: Vec::new(), seq_len: 0 });
                    list.len() - 1
                });
                let document = &mut list[index];
                let position = row * len + s - document.offset;
                document.seq_len = position + 1;
                match document.spans.last_mut() {
                    Some(span) if span.end == position => span.end += 1,
                    _ => document.spans.push(position..position + 1),
                }
            }
        }
        Ok(Self { list, size: ids.len(), row_len: len, beyond: None })
    }

    /// Checks that the batch has few enough elements to be counted; [`Layout`](crate::Layout) calls this.
    ///
    /// # Errors
    /// The requested size and the limit, if it has too many.
    pub fn check(&self) -> Result<()> {
        match &self.beyond {
            None => Ok(()),
            Some(asked) => {
                Err(Error::Documents(format!("{asked} are more than {ELEMENTS} elements, which can be counted")))
            }
        }
    }

    fn beyond(asked: String) -> Self {
        Self { list: Vec::new(), size: 0, row_len: 0, beyond: Some(asked) }
    }

    /// Number of documents.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there is no document.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Document `index`.
    pub fn get(&self, index: usize) -> &Document {
        &self.list[index]
    }

    /// All documents, in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Document> {
        self.list.iter()
    }

    /// Elements of the flat batch, padding included: B * S.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Elements of a batch row, padding included: S.
    pub fn row_len(&self) -> usize {
        self.row_len
    }

    /// Number of tokens in all documents, without padding.
    pub fn tokens(&self) -> usize {
        self.list.iter().map(Document::tokens).sum()
    }
}

/// Number of elements in `rows` rows of `len`, or an error above [`ELEMENTS`].
fn elements(rows: usize, len: usize) -> Result<usize> {
    // The number of rows is limited too, because rows may be empty.
    let fits = |&elements: &usize| elements.max(rows) <= ELEMENTS;
    rows.checked_mul(len).filter(fits).ok_or_else(|| {
        Error::Documents(format!("{rows} rows of {len} are more than {ELEMENTS} elements, which can be counted"))
    })
}

fn whole(row: usize, offset: usize, tokens: usize, seq_len: usize) -> Document {
    let spans = if tokens > 0 { std::iter::once(0..tokens).collect() } else { Vec::new() };
    Document { row, offset, spans, seq_len }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_beyond_counting_are_refused() {
        const MAX: usize = usize::MAX;
        let made = [
            Ok(Documents::batch(MAX, 2)),
            Ok(Documents::batch(2, MAX)),
            Ok(Documents::batch(MAX, 0)),
            Ok(Documents::batch(1, MAX)),
            Ok(Documents::packed(&[MAX, 2])),
            Ok(Documents::packed(&[2, MAX])),
            Ok(Documents::packed(&[MAX])),
            Documents::padded(&[1, 1], MAX),
            Documents::padded(&[MAX], 8),
            Documents::from_boundaries(&[0, MAX], MAX),
            Documents::from_rows(&[vec![MAX, 2]], 8),
            Documents::from_rows(&[vec![1], vec![2]], MAX),
        ];
        for (case, made) in made.into_iter().enumerate() {
            let refused = made.and_then(|documents| {
                documents.check().and(crate::Layout::new(crate::LayoutKind::Zigzag, &documents, 2).map(drop))
            });
            assert!(matches!(refused, Err(Error::Documents(_))), "case {case}: {refused:?}");
        }
        assert!(Documents::batch(3, 5).check().is_ok() && Documents::packed(&[]).check().is_ok());
    }
}
