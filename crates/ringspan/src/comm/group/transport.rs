//! The interface of a transport to its groups. All ranks here are world ranks.

use super::mailbox::{Address, GroupId};
use super::operation::Operation;
use super::part::CollectivePart;
use crate::comm::Buffer;
use crate::error::Result;
use std::sync::Arc;

/// A member of a group in a collective: the group, its ranks, and the member's index among them.
#[derive(Clone, Copy)]
pub(in crate::comm) struct Member<'a> {
    pub(in crate::comm) group: &'a GroupId,
    pub(in crate::comm) ranks: &'a Arc<[usize]>,
    pub(in crate::comm) index: usize,
}

impl Member<'_> {
    /// The member's world rank.
    pub(in crate::comm) fn rank(&self) -> usize {
        self.ranks[self.index]
    }
}

/// Moves messages and parts of collectives. After the first failure every call fails with that failure.
pub(in crate::comm) trait Transport: Send + Sync + 'static {
    /// Returns an error if the world has failed.
    fn check(&self, rank: usize, operation: &Operation) -> Result<()>;
    /// Records that `rank` failed; only the first failure is reported to the others.
    fn fail(&self, rank: usize, message: String);
    /// Starts sending a message and returns its number, for use with [`left`](Self::left).
    fn send(&self, address: Address, operation: &Operation, data: Arc<Buffer>) -> Result<u64>;
    /// Whether the message with this number has left `rank`. Never blocks.
    fn left(&self, rank: usize, number: u64, operation: &Operation) -> Result<bool>;
    /// Waits until the message has left, at most until the deadline.
    fn wait_left(&self, address: &Address, number: u64, operation: &Operation) -> Result<()>;
    /// Posts a receive and returns its ticket.
    fn post(&self, address: &Address, operation: &Operation) -> Result<u64>;
    /// Whether the message of a ticket has arrived; an error if it can never arrive. Never blocks.
    fn has(&self, address: &Address, ticket: u64, operation: &Operation) -> Result<bool>;
    /// Returns the message of a ticket, waiting for it until the deadline.
    fn take(&self, address: &Address, ticket: u64, operation: &Operation) -> Result<Arc<Buffer>>;
    /// Cancels a posted receive.
    fn abandon(&self, address: &Address, ticket: u64);
    /// Joins collective `number` of a group with one part for each member, waits until all members have joined, and returns
    /// the parts they sent to this one, in the group's order.
    fn join(
        &self,
        member: Member,
        number: u64,
        operation: &Operation,
        parts: Vec<CollectivePart>,
    ) -> Result<Vec<CollectivePart>>;
    /// Advances transfers, if the transport does not do so by itself. Never blocks.
    fn progress(&self);
    /// Whether messages in device memory are passed on as they are.
    fn passes_device_memory(&self) -> bool {
        false
    }
    /// Payload bytes that `rank` has sent to other ranks.
    fn bytes_sent(&self, rank: usize) -> u64;
}
