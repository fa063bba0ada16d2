//! A collective in progress: the parts that each rank has sent to each other.

use crate::comm::group::operation::Operation;
use crate::comm::group::part::CollectivePart;
use std::sync::Arc;
use std::time::Instant;

/// A collective that some rank has not left yet.
#[derive(Debug)]
pub(super) struct Round {
    /// The description by the first rank that joined, and that rank's world rank.
    pub(super) operation: Operation,
    pub(super) first: usize,
    members: Arc<[usize]>,
    /// Parts by sender and receiver (ranks of the group); empty for senders that have not joined yet.
    parts: Vec<Vec<Option<CollectivePart>>>,
    /// By receiver, the sender (world rank) and arrival time of the last part; `None` without a simulated link.
    last: Vec<Option<(usize, Instant)>>,
    missing: usize,
    left: usize,
}

impl Round {
    pub(super) fn new(operation: Operation, first: usize, members: Arc<[usize]>) -> Self {
        let missing = members.len();
        let (parts, last) = (vec![Vec::new(); missing], vec![None; missing]);
        Self { operation, first, parts, last, missing, left: 0, members }
    }

    /// Records the parts that `rank` of the group sends, one for each member.
    pub(super) fn bring(&mut self, rank: usize, parts: Vec<CollectivePart>) {
        self.parts[rank] = parts.into_iter().map(Some).collect();
        self.missing -= 1;
    }

    /// Records that the part from world rank `from` to rank `to` of the group arrives at time `due`.
    pub(super) fn delay(&mut self, from: usize, to: usize, due: Instant) {
        let last = self.last[to].get_or_insert((from, due));
        if due > last.1 {
            *last = (from, due);
        }
    }

    /// The sender and arrival time of the last part for world rank `to`.
    pub(super) fn last(&self, to: usize) -> Option<(usize, Instant)> {
        self.last[self.members.iter().position(|member| *member == to)?]
    }

    /// World ranks that have not joined yet.
    pub(super) fn missing(&self) -> Vec<usize> {
        if self.missing == 0 {
            return Vec::new();
        }
        self.members.iter().zip(&self.parts).filter(|(_, parts)| parts.is_empty()).map(|(&rank, _)| rank).collect()
    }

    /// Removes and returns the parts that all ranks sent to `rank` of the group.
    pub(super) fn collect(&mut self, rank: usize) -> Vec<CollectivePart> {
        self.left += 1;
        self.parts.iter_mut().filter_map(|parts| parts.get_mut(rank)?.take()).collect()
    }

    /// Whether all ranks have left.
    pub(super) fn is_over(&self) -> bool {
        self.left == self.parts.len()
    }
}
