//! Handles of sends and receives that have been started.

use super::mailbox::Address;
use super::operation::Operation;
use super::transport::Transport;
use crate::comm::{Buffer, Pending};
use crate::error::Result;
use std::sync::Arc;

/// A send, which ends when the message has left.
pub(super) struct PendingSend<W> {
    pub(super) world: Arc<W>,
    pub(super) address: Address,
    pub(super) operation: Operation,
    pub(super) number: u64,
}

impl<W: Transport> Pending for PendingSend<W> {
    fn test(&mut self) -> Result<bool> {
        self.world.left(self.address.from, self.number, &self.operation)
    }

    fn wait(self: Box<Self>) -> Result<Option<Arc<Buffer>>> {
        self.world.wait_left(&self.address, self.number, &self.operation).map(|()| None)
    }
}

/// A receive, matched by its ticket.
pub(super) struct PendingReceive<W: Transport> {
    world: Arc<W>,
    address: Address,
    operation: Operation,
    ticket: u64,
    taken: bool,
}

impl<W: Transport> PendingReceive<W> {
    pub(super) fn new(world: Arc<W>, address: Address, operation: Operation) -> Result<Self> {
        let ticket = world.post(&address, &operation)?;
        Ok(Self { world, address, operation, ticket, taken: false })
    }
}

impl<W: Transport> Pending for PendingReceive<W> {
    fn test(&mut self) -> Result<bool> {
        self.world.has(&self.address, self.ticket, &self.operation)
    }

    fn wait(mut self: Box<Self>) -> Result<Option<Arc<Buffer>>> {
        let data = self.world.take(&self.address, self.ticket, &self.operation)?;
        self.taken = true;
        Ok(Some(data))
    }
}

impl<W: Transport> Drop for PendingReceive<W> {
    fn drop(&mut self) {
        // Once the message has been taken, its ticket number may belong to a later receive, which must not be cancelled.
        if !self.taken {
            self.world.abandon(&self.address, self.ticket);
        }
    }
}
