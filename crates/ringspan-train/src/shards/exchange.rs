//! The exchanges of a replica group, which run while its ranks compute.

use crate::error::Result;
use ringspan::comm::{Buffer, Communicator, PendingAllToAll};
use std::{cell::Cell, sync::Arc};

/// Exchanges among the ranks of a group. All ranks start the same exchanges, in the same order.
pub(crate) struct Exchange {
    group: Arc<dyn Communicator>,
    /// Tag of the next exchange's messages.
    tag: Cell<u64>,
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
    pub(crate) fn start(&self, part: impl FnMut(usize) -> Arc<Buffer>) -> Result<PendingAllToAll> {
        let tag = self.tag.get();
        self.tag.set(tag + 1);
        Ok(self.group.start_all_to_all(tag, (0..self.group.size()).map(part).collect())?)
    }
}
