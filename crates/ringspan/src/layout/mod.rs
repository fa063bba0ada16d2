//! A layout says which rank holds which tokens.
//!
//! It is, for each rank, a list of [`Run`]s in local order. Padding is in no run, so nothing can attend to it.
//!
//! Lengths need not be multiples of anything, and a rank may hold no tokens. The example shows the kinds of layouts by the
//! rank that holds each of 16 tokens:
//!
//! ```
//! use ringspan::{Documents, Layout, LayoutKind};
//!
//! let owners = |kind: &str, lengths: &[usize]| {
//!     let layout = Layout::new(kind.parse()?, &Documents::packed(lengths), 4)?;
//!     let mut owners = [0; 16];
//!     (0..4).for_each(|rank| layout.rows(rank).into_iter().for_each(|row| owners[row] = rank));
//!     Ok::<_, ringspan::Error>(owners.map(|rank| rank.to_string()).concat())
//! };
//! // Neighbouring tokens stay together: windows and documents stay on few ranks.
//! assert_eq!(owners("contiguous", &[16])?, "0000111122223333");
//! // Each rank holds an early and a late part: causal work is even.
//! assert_eq!(owners("zigzag", &[16])?, "0011223333221100");
//! // Work is even in any part of the sequence, at the price of narrow tiles.
//! assert_eq!(owners("striped:1", &[16])?, "0123012301230123");
//! // Zigzag in each document keeps the work of packed documents even.
//! assert_eq!(owners("per-document-zigzag", &[8, 8])?, "0123321001233210");
//! # Ok::<_, ringspan::Error>(())
//! ```
//!
//! A fifth kind, balanced, distributes blocks by the number of pairs that the given mask leaves visible.
//!
//! A run lies in one of the [`Documents`], and its positions count from the start of that document:
//!
//! ```
//! use ringspan::{Documents, Layout, LayoutKind, Run};
//!
//! // Two rows of 6 tokens, the second with 3 tokens and padding after them.
//! let documents = Documents::padded(&[6, 3], 6)?;
//! let layout = Layout::new(LayoutKind::Contiguous, &documents, 2)?;
//! assert_eq!(layout.runs(1), [
//!     Run { document: 0, start: 3, len: 3, step: 1 },
//!     Run { document: 1, start: 1, len: 2, step: 1 },
//! ]);
//! assert_eq!(layout.rows(1), [3, 4, 5, 7, 8]);           // in the flat batch
//! assert_eq!(layout.shard(1, &[0, 10, 20, 30, 40, 50, 60, 70, 80, 0, 0, 0], 1)?, [30, 40, 50, 70, 80]);
//!
//! // A stripe is one run with a step.
//! let striped = Layout::new(LayoutKind::Striped(1), &Documents::batch(1, 10), 4)?;
//! assert_eq!(striped.runs(1), [Run { document: 0, start: 1, len: 3, step: 4 }]);
//! # Ok::<_, ringspan::Error>(())
//! ```
//!
//! The tokens of a document with gaps (padding, or other documents between its tokens) are distributed in the order of the
//! sequence like all others. On each rank they are then stored next to each other, in the order of their positions:
//!
//! ```
//! use ringspan::{Documents, Layout, LayoutKind};
//!
//! let documents = Documents::from_ids(&[1, 2, 1, 1, 0, 2, 2, 1], 8)?;
//! let layout = Layout::new(LayoutKind::Contiguous, &documents, 1)?;
//! assert_eq!(layout.rows(0), [0, 2, 3, 7, 1, 5, 6]);
//! # Ok::<_, ringspan::Error>(())
//! ```
//!
//! The chapter on [`schedule`](crate::schedule#balance) compares the costs of the kinds.

mod balanced;
mod kind;

pub use kind::LayoutKind;

use crate::documents::{Documents, Run};
use crate::error::{Error, Result};
use crate::mask::Mask;
use std::sync::Arc;

/// The tokens of each rank, as runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    kind: LayoutKind,
    documents: Arc<Documents>,
    ranks: Vec<Vec<Run>>,
}

impl Layout {
    /// Distributes the tokens of `documents` over `ranks` ranks. Any length and number of ranks will do; a rank may hold no
    /// tokens.
    ///
    /// [`LayoutKind::Balanced`] is balanced for causal attention; [`pair`](Self::pair) takes any mask.
    ///
    /// # Errors
    /// Zero ranks, or stripes or blocks of zero tokens.
    pub fn new(kind: LayoutKind, documents: &Documents, ranks: usize) -> Result<Self> {
        Ok(Self::pair(kind, documents, documents, &Mask::causal(), ranks)?.0)
    }

    /// Distributes queries and keys over `ranks` ranks. If both are the same documents, they have the same layout.
    ///
    /// [`LayoutKind::Balanced`] distributes queries so that each rank has about the same number of pairs visible under
    /// `mask`. Keys of other documents than the queries' are then distributed contiguously.
    ///
    /// # Errors
    /// Zero ranks, stripes or blocks of zero tokens, documents that do not pair up, or a mask that does not fit them.
    pub fn pair(
        kind: LayoutKind,
        queries: &Documents,
        keys: &Documents,
        mask: &Mask,
        ranks: usize,
    ) -> Result<(Self, Self)> {
        if ranks == 0 {
            return Err(Error::Layout("0 ranks cannot hold tokens; at least 1 is needed".into()));
        }
        kind.check()?;
        queries.check()?;
        keys.check()?;
        if queries.len() != keys.len() {
            return Err(Error::Documents(format!(
                "{} documents of queries do not pair with {} of keys",
                queries.len(),
                keys.len()
            )));
        }
        mask.check(queries.len())?;
        let distribute = |documents: &Documents| match (kind, documents == queries) {
            (LayoutKind::Balanced(block), true) => balanced::distribute(queries, keys, mask, block, ranks),
            _ => kind.distribute(documents, ranks),
        };
        let layout =
            |documents: &Documents| Self { kind, ranks: distribute(documents), documents: Arc::new(documents.clone()) };
        let query = layout(queries);
        let key = if keys == queries { query.clone() } else { layout(keys) };
        Ok((query, key))
    }

    /// Distributes each document by pages, as a paged cache does: the positions from `i * page` to `(i + 1) * page` of every
    /// document belong to rank `i mod P`. Documents with gaps are not supported.
    ///
    /// [`LayoutKind::Striped`], in contrast, counts tokens in the batch row, and may store a rank's tokens in another order.
    ///
    /// # Errors
    /// Zero ranks, pages of zero tokens, too many elements to count, or documents with gaps.
    pub fn paged(documents: &Documents, page: usize, ranks: usize) -> Result<Self> {
        if ranks == 0 || page == 0 {
            return Err(Error::Layout(format!("pages of {page} tokens on {ranks} ranks: the least is 1 of each")));
        }
        documents.check()?;
        let mut of_ranks = vec![Vec::new(); ranks];
        for (document, tokens) in documents.iter().enumerate() {
            let positions = match &tokens.spans[..] {
                [] => continue,
                [positions] => positions.clone(),
                spans => return Err(Error::Layout(format!("document {document} has {} gaps", spans.len() - 1))),
            };
            for number in positions.start / page..positions.end.div_ceil(page) {
                let start = positions.start.max(number.saturating_mul(page));
                let end = positions.end.min((number + 1).saturating_mul(page));
                of_ranks[number % ranks].push(Run { document, start, len: end - start, step: 1 });
            }
        }
        let ranks = of_ranks.into_iter().map(|runs| joined(runs.into_iter())).collect();
        Ok(Self { kind: LayoutKind::Striped(page), documents: Arc::new(documents.clone()), ranks })
    }

    /// The rule by which the tokens were distributed.
    pub fn kind(&self) -> LayoutKind {
        self.kind
    }

    /// The documents that the tokens belong to.
    pub fn documents(&self) -> &Documents {
        &self.documents
    }

    /// Number of ranks P.
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// The runs of `rank`, in local order.
    pub fn runs(&self, rank: usize) -> &[Run] {
        &self.ranks[rank]
    }

    /// Number of tokens on `rank`.
    pub fn tokens(&self, rank: usize) -> usize {
        self.ranks[rank].iter().map(|run| run.len).sum()
    }

    /// Position inside its document of every token of `rank`, in local order.
    pub fn positions(&self, rank: usize) -> Vec<usize> {
        self.ranks[rank].iter().flat_map(|run| run.positions()).collect()
    }

    /// Index in the flat batch (`b * S + s`) of every token of `rank`, in local order.
    pub fn rows(&self, rank: usize) -> Vec<usize> {
        let row = |run: &Run| {
            let offset = self.documents.get(run.document).offset;
            run.positions().map(move |position| offset + position)
        };
        self.ranks[rank].iter().flat_map(row).collect()
    }

    /// The part of a global tensor `[B*S, width]` that `rank` holds: `[T, width]`.
    ///
    /// # Errors
    /// A tensor with another number of elements.
    pub fn shard<T: Copy>(&self, rank: usize, global: &[T], width: usize) -> Result<Vec<T>> {
        self.check("shard", "the global tensor", global.len(), self.documents.size(), width)?;
        let mut local = Vec::with_capacity(self.tokens(rank) * width);
        for row in self.rows(rank) {
            local.extend_from_slice(&global[row * width..(row + 1) * width]);
        }
        Ok(local)
    }

    /// Writes the local tensor of `rank`, `[T, width]`, to its rows of a global tensor `[B*S, width]`.
    ///
    /// # Errors
    /// Tensors with other numbers of elements.
    pub fn unshard<T: Copy>(&self, rank: usize, local: &[T], width: usize, global: &mut [T]) -> Result<()> {
        self.check("unshard", "the global tensor", global.len(), self.documents.size(), width)?;
        self.check("unshard", "the local tensor", local.len(), self.tokens(rank), width)?;
        if width > 0 {
            for (row, values) in self.rows(rank).into_iter().zip(local.chunks_exact(width)) {
                global[row * width..(row + 1) * width].copy_from_slice(values);
            }
        }
        Ok(())
    }

    /// The layout of groups of ranks: each group holds the tokens of its members, in the given order.
    pub fn grouped(&self, groups: &[Vec<usize>]) -> Self {
        let runs = |members: &Vec<usize>| joined(members.iter().flat_map(|&rank| self.ranks[rank].iter().copied()));
        Self { kind: self.kind, documents: self.documents.clone(), ranks: groups.iter().map(runs).collect() }
    }

    /// The same ranks with their runs sorted and merged, regardless of local order: for counting and drawing.
    pub(crate) fn merged(&self) -> Self {
        let merge = |runs: &Vec<Run>| {
            // Striped runs interleave, so sorting them by their first tokens would join none.
            if runs.iter().any(|run| run.step > 1) {
                return runs.clone();
            }
            let mut sorted = runs.clone();
            sorted.sort_by_key(|run| (run.document, run.start));
            joined(sorted.into_iter())
        };
        Self { ranks: self.ranks.iter().map(merge).collect(), ..self.clone() }
    }

    fn check(
        &self,
        operation: &'static str,
        what: &'static str,
        actual: usize,
        tokens: usize,
        width: usize,
    ) -> Result<()> {
        let expected = tokens.saturating_mul(width);
        if actual == expected {
            return Ok(());
        }
        Err(Error::Shape { operation, what, expected, actual, shape: format!("{tokens} tokens x {width}") })
    }
}

/// Reorders each rank's tokens so that those of a document with gaps are next to each other, in the order of their
/// positions.
///
/// Runs of queries often see many pieces of such a document completely. If these are next to each other on their rank, they
/// are one tile; in the order of the sequence there would be a tile for each pair of pieces.
fn gathered(ranks: Vec<Vec<Run>>, documents: &Documents) -> Vec<Vec<Run>> {
    let has_gaps = |document: usize| documents.get(document).spans.len() > 1;
    if !(0..documents.len()).any(has_gaps) {
        return ranks.into_iter().map(|runs| joined(runs.into_iter())).collect();
    }
    let gather = |runs: Vec<Run>| {
        let mut tokens = Vec::new();
        for run in runs {
            match run.step > 1 && has_gaps(run.document) {
                true => tokens.extend(run.positions().map(|start| Run { start, len: 1, step: 1, ..run })),
                false => tokens.push(run),
            }
        }
        // The sort is stable: runs of a document without gaps keep their order.
        tokens.sort_by_key(|run| (run.document, if has_gaps(run.document) { run.start } else { 0 }));
        joined(tokens.into_iter())
    };
    ranks.into_iter().map(gather).collect()
}

/// Joins runs that continue each other, and drops empty ones.
fn joined(runs: impl Iterator<Item = Run>) -> Vec<Run> {
    let mut out: Vec<Run> = Vec::new();
    for run in runs.filter(|run| run.len > 0) {
        match out.last_mut() {
            Some(last) if last.continues_with(&run) => {
                last.step = if last.len > 1 { last.step } else { run.start - last.start };
                last.len += run.len;
            }
            _ => out.push(run),
        }
    }
    out
}

#[cfg(test)]
mod test;
