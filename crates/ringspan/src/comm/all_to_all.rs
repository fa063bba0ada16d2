//! An all-to-all that is started, runs while the rank computes, and is then waited for.

use super::{Buffer, Communicator, Pending};
use crate::error::{Error, Result};
use std::sync::Arc;

/// An all-to-all that was started by [`Communicator::start_all_to_all`].
pub struct PendingAllToAll {
    sends: Vec<Box<dyn Pending>>,
    /// The parts that the caller has not taken yet, in descending order of ranks.
    parts: Vec<IncomingPart>,
}

/// The part that a rank sends to this one.
enum IncomingPart {
    Own(Arc<Buffer>),
    Pending(Box<dyn Pending>),
}

impl PendingAllToAll {
    pub(super) fn start(comm: &(impl Communicator + ?Sized), tag: u64, parts: Vec<Arc<Buffer>>) -> Result<Self> {
        let (rank, ranks) = (comm.rank(), comm.size());
        if parts.len() != ranks {
            return Err(Error::Communicator {
                rank,
                operation: format!("start_all_to_all (tag {tag})"),
                problem: format!("{} parts for {ranks} ranks", parts.len()),
            });
        }
        // Each rank begins with its neighbour, so that no rank is sent to by all at once.
        let others = (1..ranks).map(|ahead| (rank + ahead) % ranks);
        let sends = others.map(|to| comm.send(to, tag, parts[to].clone())).collect::<Result<_>>()?;
        let part = |from: usize| match from == rank {
            true => Ok(IncomingPart::Own(parts[rank].clone())),
            false => comm.receive(from, tag).map(IncomingPart::Pending),
        };
        Ok(Self { sends, parts: (0..ranks).rev().map(part).collect::<Result<_>>()? })
    }

    /// Waits for the part of the next rank, in ascending order of ranks; `None` after the last. A caller that drops each part
    /// before it takes the next holds one at a time.
    ///
    /// # Errors
    /// Failures of other ranks, and the deadline.
    pub fn next_part(&mut self) -> Result<Option<Arc<Buffer>>> {
        match self.parts.pop() {
            None => Ok(None),
            Some(IncomingPart::Own(part)) => Ok(Some(part)),
            Some(IncomingPart::Pending(pending)) => pending.wait(),
        }
    }

    /// Waits until everything that this rank sent has left.
    ///
    /// # Errors
    /// Failures of other ranks, and the deadline.
    pub fn finish(self) -> Result<()> {
        self.sends.into_iter().try_for_each(|send| send.wait().map(drop))
    }

    /// Waits for all parts, and returns them in the order of ranks.
    ///
    /// # Errors
    /// Failures of other ranks, and the deadline.
    pub fn wait(mut self) -> Result<Vec<Arc<Buffer>>> {
        let mut parts = Vec::with_capacity(self.parts.len());
        while let Some(part) = self.next_part()? {
            parts.push(part);
        }
        self.finish()?;
        Ok(parts)
    }
}
