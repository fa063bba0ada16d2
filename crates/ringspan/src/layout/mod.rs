//! Which rank holds which tokens.
//!
//! A layout is, per rank, a list of [`Run`]s in local order. Padding is in no run, so nothing can attend to it.

mod documents;
mod kind;

pub use documents::{Document, Documents};
pub use kind::LayoutKind;

use crate::error::{Error, Result};
use std::sync::Arc;

/// Tokens of one document in arithmetic progression: positions `start, start + step, ..`, `len` of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// Index of the document in its [`Documents`].
    pub document: usize,
    /// Position of the first token inside the document.
    pub start: usize,
    /// Tokens.
    pub len: usize,
    /// Distance of neighbours; 1 unless the layout is striped.
    pub step: usize,
}

impl Run {
    /// Positions inside the document, in order.
    pub fn positions(self) -> impl Iterator<Item = usize> {
        (0..self.len).map(move |i| self.start + i * self.step)
    }

    /// Whether `next` goes on where this run ends, so that both are one run.
    fn continues_with(&self, next: &Run) -> bool {
        let step = if self.len > 1 { self.step } else { next.step };
        self.document == next.document
            && (next.len == 1 || next.step == step)
            && self.start + self.len * step == next.start
    }
}

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
    /// # Errors
    /// No ranks.
    pub fn new(kind: LayoutKind, documents: &Documents, ranks: usize) -> Result<Self> {
        if ranks == 0 {
            return Err(Error::Layout("0 ranks cannot hold tokens; at least 1 is needed".into()));
        }
        let runs = kind.deal(documents, ranks);
        Ok(Self { kind, documents: Arc::new(documents.clone()), ranks: runs })
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

    /// The layout of groups of `size` neighbouring ranks, each holding what its members hold, in member order.
    ///
    /// # Errors
    /// Ranks that do not divide into such groups.
    pub fn grouped(&self, size: usize) -> Result<Self> {
        if size == 0 || !self.ranks().is_multiple_of(size) {
            return Err(Error::Layout(format!("{} ranks do not divide into groups of {size}", self.ranks())));
        }
        let ranks = self.ranks.chunks_exact(size).map(|members| joined(members.iter().flatten().copied())).collect();
        Ok(Self { kind: self.kind, documents: self.documents.clone(), ranks })
    }

    fn check(
        &self,
        operation: &'static str,
        what: &'static str,
        actual: usize,
        tokens: usize,
        width: usize,
    ) -> Result<()> {
        let expected = tokens * width;
        if actual == expected {
            return Ok(());
        }
        Err(Error::Shape { operation, what, expected, actual, shape: format!("{tokens} tokens x {width}") })
    }
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
