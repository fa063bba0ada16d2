//! Handles of sends and receives.

use super::mailbox::Address;
use super::operation::Operation;
use super::world::World;
use crate::comm::{Buffer, Pending};
use crate::error::Result;
use std::sync::Arc;

/// A send ends when it starts: the mailbox owns the message.
pub(super) struct Sent {
    pub(super) world: Arc<World>,
    pub(super) rank: usize,
    pub(super) operation: Operation,
}

impl Pending for Sent {
    fn test(&mut self) -> Result<bool> {
        self.world.check(self.rank, &self.operation).map(|()| true)
    }

    fn wait(self: Box<Self>) -> Result<Option<Arc<Buffer>>> {
        self.world.check(self.rank, &self.operation).map(|()| None)
    }
}

/// A receive, matched by its ticket.
pub(super) struct Receiving {
    world: Arc<World>,
    address: Address,
    operation: Operation,
    ticket: u64,
    taken: bool,
}

impl Receiving {
    pub(super) fn new(world: Arc<World>, address: Address, operation: Operation) -> Result<Self> {
        let ticket = world.post(&address, &operation)?;
        Ok(Self { world, address, operation, ticket, taken: false })
    }
}

impl Pending for Receiving {
    fn test(&mut self) -> Result<bool> {
        self.world.has(&self.address, self.ticket, &self.operation)
    }

    fn wait(mut self: Box<Self>) -> Result<Option<Arc<Buffer>>> {
        let data = self.world.take(&self.address, self.ticket, &self.operation)?;
        self.taken = true;
        Ok(Some(data))
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        // A ticket may be given again once its message is taken.
        if !self.taken {
            self.world.abandon(&self.address, self.ticket);
        }
    }
}
