//! One collective under way: what each rank brought for each other.

use super::operation::Operation;
use crate::comm::Buffer;
use std::ops::Range;
use std::sync::Arc;

/// Some elements of a buffer; ranks that get different parts of one share it.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) data: Arc<Buffer>,
    pub(super) range: Range<usize>,
}

impl Part {
    pub(super) fn whole(data: Arc<Buffer>) -> Self {
        let range = 0..data.len();
        Self { data, range }
    }

    pub(super) fn bytes(&self) -> u64 {
        match self.data.len() as u64 {
            0 => 0,
            elements => self.data.bytes() / elements * self.range.len() as u64,
        }
    }
}

/// A collective that not all ranks have left.
#[derive(Debug)]
pub(super) struct Round {
    /// How the first rank described it, and which rank of the world that was.
    pub(super) operation: Operation,
    pub(super) first: usize,
    members: Arc<[usize]>,
    /// By sender and receiver, ranks of the group; empty for ranks that are not here yet.
    parts: Vec<Vec<Option<Part>>>,
    missing: usize,
    left: usize,
}

impl Round {
    pub(super) fn new(operation: Operation, first: usize, members: Arc<[usize]>) -> Self {
        let missing = members.len();
        Self { operation, first, parts: vec![Vec::new(); missing], missing, left: 0, members }
    }

    /// What `rank` of the group brings: a part for each member.
    pub(super) fn bring(&mut self, rank: usize, parts: Vec<Part>) {
        self.parts[rank] = parts.into_iter().map(Some).collect();
        self.missing -= 1;
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
