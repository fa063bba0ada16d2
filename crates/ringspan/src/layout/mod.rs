//! Which rank holds which tokens.
//!
//! A layout is, per rank, a list of [`Run`]s in local order. Padding is in no run, so nothing can attend to it.
//!
//! No length need divide by anything, and a rank may hold nothing. The kinds, by the rank that holds each of 16
//! tokens:
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
//! // Neighbours together: windows and documents stay on few ranks.
//! assert_eq!(owners("contiguous", &[16])?, "0000111122223333");
//! // An early and a late part each: causal work is even.
//! assert_eq!(owners("zigzag", &[16])?, "0011223333221100");
//! // Even in any part of the sequence, at the price of narrow tiles.
//! assert_eq!(owners("striped:1", &[16])?, "0123012301230123");
//! // Zigzag in each document: packed documents are even.
//! assert_eq!(owners("per-document-zigzag", &[8, 8])?, "0123321001233210");
//! # Ok::<_, ringspan::Error>(())
//! ```
//!
//! A fifth kind, balanced, deals blocks by the pairs that the mask at hand leaves visible.
//!
//! Documents are what [`Documents`] says; a run lies in one of them, and positions count from its start:
//!
//! ```
//! use ringspan::{Documents, Layout, LayoutKind, Run};
//!
//! // Two rows of 6 tokens, the second padded behind 3.
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
//! Tokens of a document with gaps, which other documents or padding lie in, are dealt in the order of the sequence as any
//! others, and are then neighbours on their rank, in the order of their positions:
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
//! What each kind costs and gains is in the chapter on [`schedule`](crate::schedule#balance).

mod balanced;
mod kind;

pub use kind::LayoutKind;

use crate::documents::{Documents, Run};
use crate::error::{Error, Result};
use crate::mask::Mask;
use std::sync::Arc;

/// The tokens of every rank, as runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    kind: LayoutKind,
    documents: Arc<Documents>,
    ranks: Vec<Vec<Run>>,
}

impl Layout {
    /// Deals the tokens of `documents` to `ranks` ranks. Any length, any number of ranks; a rank may get none.
    ///
    /// [`LayoutKind::Balanced`] is balanced for causal attention; [`pair`](Self::pair) takes any mask.
    ///
    /// # Errors
    /// No ranks, stripes or blocks of no tokens.
    pub fn new(kind: LayoutKind, documents: &Documents, ranks: usize) -> Result<Self> {
        Ok(Self::pair(kind, documents, documents, &Mask::causal(), ranks)?.0)
    }

    /// Deals queries and keys to `ranks` ranks. Where both are the same documents, so are the layouts.
    ///
    /// [`LayoutKind::Balanced`] evens out the pairs that `mask` leaves visible, by where the queries are; other keys
    /// than the queries' own are then dealt contiguously.
    ///
    /// # Errors
    /// No ranks, stripes or blocks of no tokens, documents that do not pair up, or a mask that does not fit them.
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
        let deal = |documents: &Documents| match (kind, documents == queries) {
            (LayoutKind::Balanced(block), true) => balanced::deal(queries, keys, mask, block, ranks),
            _ => kind.deal(documents, ranks),
        };
        let layout =
            |documents: &Documents| Self { kind, ranks: deal(documents), documents: Arc::new(documents.clone()) };
        let query = layout(queries);
        let key = if keys == queries { query.clone() } else { layout(keys) };
        Ok((query, key))
    }

    /// How the tokens were dealt.
    pub fn kind(&self) -> LayoutKind {
        self.kind
    }

    /// The documents that were dealt.
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

    /// Tokens on `rank`.
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
    /// A tensor of another size.
    pub fn shard<T: Copy>(&self, rank: usize, global: &[T], width: usize) -> Result<Vec<T>> {
        self.check("shard", "the global tensor", global.len(), self.documents.size(), width)?;
        let mut local = Vec::with_capacity(self.tokens(rank) * width);
        for row in self.rows(rank) {
            local.extend_from_slice(&global[row * width..(row + 1) * width]);
        }
        Ok(local)
    }

    /// Writes what `rank` holds, `[T, width]`, to its places in a global tensor `[B*S, width]`.
    ///
    /// # Errors
    /// Tensors of another size.
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

    /// The layout of groups of ranks, each holding what its members hold, in the given order.
    pub fn grouped(&self, groups: &[Vec<usize>]) -> Self {
        let runs = |members: &Vec<usize>| joined(members.iter().flat_map(|&rank| self.ranks[rank].iter().copied()));
        Self { kind: self.kind, documents: self.documents.clone(), ranks: groups.iter().map(runs).collect() }
    }

    /// The same tokens on the same ranks, neighbours in one run whatever their local order: for counting and drawing.
    pub(crate) fn merged(&self) -> Self {
        let merge = |runs: &Vec<Run>| {
            // Stripes interleave, so an order by their first tokens joins none of them.
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

/// The runs of each rank, with tokens of a document that has gaps next to each other in the order of their positions.
///
/// Between two runs all tokens of a document that lies in pieces can be in sight as a whole, if they are neighbours on their
/// rank; in the order of the sequence, they would be as many tiles as there are pairs of pieces.
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
        // Stable: runs of a document without gaps stay in their order.
        tokens.sort_by_key(|run| (run.document, if has_gaps(run.document) { run.start } else { 0 }));
        joined(tokens.into_iter())
    };
    ranks.into_iter().map(gather).collect()
}

/// Joins runs that follow each other, and drops empty ones.
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
