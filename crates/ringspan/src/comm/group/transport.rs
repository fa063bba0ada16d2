//! What a transport does for its groups. Ranks here are ranks of the world.

use super::mailbox::{Address, GroupId};
use super::operation::Operation;
use super::part::Part;
use crate::comm::Buffer;
use crate::error::Result;
use std::sync::Arc;

/// A member of a group, in a collective: the group, the ranks in it, and the member's place among them.
#[derive(Clone, Copy)]
pub(in crate::comm) struct Member<'a> {
    pub(in crate::comm) group: &'a GroupId,
    pub(in crate::comm) ranks: &'a Arc<[usize]>,
    pub(in crate::comm) place: usize,
}

impl Member<'_> {
    /// Its rank of the world.
    pub(in crate::comm) fn rank(&self) -> usize {
        self.ranks[self.place]
    }
}

/// Moves messages and collectives; after the first failure every call fails with it.
pub(in crate::comm) trait Transport: Send + Sync + 'static {
    /// An error if the world has failed.
    fn check(&self, rank: usize, operation: &Operation) -> Result<()>;
    /// Records that `rank` failed; the first failure is what the others are told.
    fn fail(&self, rank: usize, message: String);
    /// Starts sending a message and returns the number under which [`left`](Self::left) knows it.
    fn send(&self, address: Address, operation: &Operation, data: Arc<Buffer>) -> Result<u64>;
    /// Whether the message of that number has left `rank`. Never blocks.
    fn left(&self, rank: usize, number: u64, operation: &Operation) -> Result<bool>;
    /// Waits until it has, at most to the deadline.
    fn wait_left(&self, address: &Address, number: u64, operation: &Operation) -> Result<()>;
    /// Posts a receive and returns its ticket.
    fn post(&self, address: &Address, operation: &Operation) -> Result<u64>;
    /// Whether the message of a ticket is here; an error if it can never come. Never blocks.
    fn has(&self, address: &Address, ticket: u64, operation: &Operation) -> Result<bool>;
    /// Takes the message of a ticket, waiting for it until the deadline.
    fn take(&self, address: &Address, ticket: u64, operation: &Operation) -> Result<Arc<Buffer>>;
    /// Gives a posted receive up.
    fn abandon(&self, address: &Address, ticket: u64);
    /// Joins collective `number` of a group, with one part for each member; returns what they brought for this one, in
    /// the group's order, once all are here.
    fn join(&self, member: Member, number: u64, operation: &Operation, parts: Vec<Part>) -> Result<Vec<Part>>;
    /// Moves transfers along, where nothing moves by itself. Never blocks.
    fn progress(&self);
    /// Whether a message in the memory of a device arrives as it is.
    fn hands_over(&self) -> bool {
        false
    }
    /// Payload that `rank` has sent to other ranks, in bytes.
    fn bytes_sent(&self, rank: usize) -> u64;
}
