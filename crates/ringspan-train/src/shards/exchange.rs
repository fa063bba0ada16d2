//! An all-to-all that is started, runs while the rank computes, and is then waited for.

use crate::error::Result;
use ringspan::comm::{Buffer, Communicator, Pending};
use std::{cell::Cell, sync::Arc};

/// Exchanges among the ranks of a group. All ranks start the same exchanges, in the same order.
pub(crate) struct Exchange {
    group: Arc<dyn Communicator>,
    /// Tag of the next exchange's messages.
    tag: Cell<u64>,
}

/// An exchange that was started.
pub(crate) struct UnderWay {
    rank: usize,
    own: Arc<Buffer>,
    sends: Vec<Box<dyn Pending>>,
    /// Messages from the other ranks, in rank order.
    receives: Vec<Box<dyn Pending>>,
}

impl Exchange {
    /// The group must be used for nothing else: exchanges number their messages.
    pub(crate) fn new(group: Arc<dyn Communicator>) -> Self {
        Self { group, tag: Cell::new(0) }
    }

    pub(crate) fn group(&self) -> &Arc<dyn Communicator> {
        &self.group
    }

    /// Starts to send `part(r)` to each rank r. Parts are handed over, not copied, where ranks share memory.
    pub(crate) fn start(&self, mut part: impl FnMut(usize) -> Arc<Buffer>) -> Result<UnderWay> {
        let (rank, ranks, tag) = (self.group.rank(), self.group.size(), self.tag.get());
        self.tag.set(tag + 1);
        // Each rank begins with its neighbour, so that no rank is sent to by all at once.
        let others = (1..ranks).map(|ahead| (rank + ahead) % ranks);
        let sends = others.map(|to| self.group.send(to, tag, part(to))).collect::<ringspan::Result<_>>()?;
        let others = (0..ranks).filter(|from| *from != rank);
        let receives = others.map(|from| self.group.receive(from, tag)).collect::<ringspan::Result<_>>()?;
        Ok(UnderWay { rank, own: part(rank), sends, receives })
    }
}

impl UnderWay {
    /// Waits for the exchange and returns what each rank sent here, in rank order.
    pub(crate) fn finish(self) -> Result<Vec<Arc<Buffer>>> {
        let mut parts = Vec::with_capacity(self.receives.len() + 1);
        for receive in self.receives {
            parts.extend(receive.wait()?);
        }
        parts.insert(self.rank.min(parts.len()), self.own);
        for send in self.sends {
            send.wait()?;
        }
        Ok(parts)
    }
}
