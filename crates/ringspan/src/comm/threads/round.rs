//! One collective under way: what each rank brought for each other.

use crate::comm::group::operation::Operation;
use crate::comm::group::part::Part;
use std::sync::Arc;
use std::time::Instant;

/// A collective that not all ranks have left.
#[derive(Debug)]
pub(super) struct Round {
    /// How the first rank described it, and which rank of the world that was.
    pub(super) operation: Operation,
    pub(super) first: usize,
    members: Arc<[usize]>,
    /// By sender and receiver, ranks of the group; empty for ranks that are not here yet.
    parts: Vec<Vec<Option<Part>>>,
    /// By receiver, when the last part arrives and which rank of the world sent it; empty without a link.
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

    /// What `rank` of the group brings: a part for each member.
    pub(super) fn bring(&mut self, rank: usize, parts: Vec<Part>) {
        self.parts[rank] = parts.into_iter().map(Some).collect();
        self.missing -= 1;
    }

    /// What rank `from` of the world brought for `to` of the group arrives at `due`.
    pub(super) fn delay(&mut self, from: usize, to: usize, due: Instant) {
        let last = self.last[to].get_or_insert((from, due));
        if due > last.1 {
            *last = (from, due);
        }
    }

    /// When the last part for rank `to` of the world arrives, and who sent it.
    pub(super) fn last(&self, to: usize) -> Option<(usize, Instant)> {
        self.last[self.members.iter().position(|member| *member == to)?]
    }

    /// Ranks of the world that are not here yet.
    pub(super) fn missing(&self) -> Vec<usize> {
        if self.missing == 0 {
            return Vec::new();
        }
        self.members.iter().zip(&self.parts).filter(|(_, parts)| parts.is_empty()).map(|(&rank, _)| rank).collect()
    }

    /// What all brought for `rank` of the group.
    pub(super) fn collect(&mut self, rank: usize) -> Vec<Part> {
        self.left += 1;
        self.parts.iter_mut().filter_map(|parts| parts.get_mut(rank)?.take()).collect()
    }

    /// Whether all have left.
    pub(super) fn is_over(&self) -> bool {
        self.left == self.parts.len()
    }
}
