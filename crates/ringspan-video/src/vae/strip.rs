//! The columns of a video that a rank computes, and the exchange of border columns with its neighbours.

use crate::error::Result;
use ringspan::comm::{Buffer, Communicator};
use ringspan::{Group, Kernel};
use std::ops::Range;
use std::sync::Arc;

/// Tags of the messages to the neighbour on the left, and to the one on the right.
const TO_LEFT: u64 = 0;
const TO_RIGHT: u64 = 1;

/// How the columns of latents are cut over ranks: each has as many, the last ones fewer or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ColumnSplit {
    pub(crate) width: usize,
    pub(crate) ranks: usize,
}

impl ColumnSplit {
    /// Columns of the first rank, which has most.
    pub(crate) fn most(self) -> usize {
        self.width.div_ceil(self.ranks)
    }

    /// Columns of a rank.
    pub(crate) fn columns(self, rank: usize) -> Range<usize> {
        let at = |rank: usize| (rank * self.most()).min(self.width);
        at(rank)..at(rank + 1)
    }

    /// Number of ranks that have columns.
    fn active(self) -> usize {
        self.width.div_ceil(self.most().max(1))
    }
}

/// A rank's columns, with its connections to the other ranks.
pub(crate) struct Strip {
    split: ColumnSplit,
    /// For border columns alone, so that its tags are not those of attention.
    comm: Arc<dyn Communicator>,
    group: Group,
}

/// The columns beside those of a rank, if its neighbours have some: `[frames * rows, channels]`.
pub(crate) struct Borders {
    pub(crate) left: Option<Arc<Buffer>>,
    pub(crate) right: Option<Arc<Buffer>>,
}

impl Strip {
    /// Connects the ranks of `comm`, all of which call this. `kernel` computes attention.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub(crate) fn new(comm: &Arc<dyn Communicator>, width: usize, kernel: Kernel) -> Result<Self> {
        let split = ColumnSplit { width, ranks: comm.size() };
        let group = Group::new(comm.clone(), (comm.size(), 1), kernel)?;
        Ok(Self { split, comm: comm.split(0, comm.rank())?, group })
    }

    /// The latent columns of this rank.
    pub(crate) fn columns(&self) -> Range<usize> {
        self.split.columns(self.comm.rank())
    }

    pub(crate) fn split(&self) -> ColumnSplit {
        self.split
    }

    /// The ranks as a ring, for attention.
    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// Exchanges border columns: this rank's own are `first` and `last`. `left` and `right` say on which sides the ranks need
    /// the columns of their neighbours.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub(crate) fn exchange(
        &self,
        first: impl FnOnce() -> Vec<f32>,
        last: impl FnOnce() -> Vec<f32>,
        (left, right): (bool, bool),
    ) -> Result<Borders> {
        let rank = self.comm.rank();
        if rank >= self.split.active() {
            return Ok(Borders { left: None, right: None });
        }
        let before = rank.checked_sub(1);
        let after = Some(rank + 1).filter(|next| *next < self.split.active());
        let mut sent = Vec::new();
        if let Some(to) = before.filter(|_| right) {
            sent.push(self.comm.send(to, TO_LEFT, Buffer::F32(first()).into())?);
        }
        if let Some(to) = after.filter(|_| left) {
            sent.push(self.comm.send(to, TO_RIGHT, Buffer::F32(last()).into())?);
        }
        let receive = |from: Option<usize>, tag| match from {
            Some(from) => self.comm.receive(from, tag).and_then(|pending| pending.wait()),
            None => Ok(None),
        };
        let borders = Borders {
            left: receive(before.filter(|_| left), TO_RIGHT)?,
            right: receive(after.filter(|_| right), TO_LEFT)?,
        };
        for pending in sent {
            pending.wait()?;
        }
        Ok(borders)
    }
}
