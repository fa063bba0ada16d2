//! Reference counts of the pages of sliding-window layers, kept by rank 0. A sequence holds only the pages that its next tokens
//! still see; the prefix cache keeps the others until sequences need them.

use super::page_pool::PagePool;
use super::prefix_tree::NodeId;
use std::collections::{BTreeSet, HashMap};

/// The pages of sliding-window layers, on all ranks.
#[derive(Debug)]
pub(super) struct WindowPagePool {
    pages: PagePool,
    /// The largest number of tokens before its own that a token sees.
    lookback: usize,
    /// The node of each page that the prefix cache keeps.
    node_of: HashMap<(usize, u32), NodeId>,
    /// For each rank, the pages that only the prefix cache keeps, the least recently released first.
    evictable: Vec<BTreeSet<(u64, u32)>>,
    /// When each of them was released.
    released: HashMap<(usize, u32), u64>,
    clock: u64,
}

impl WindowPagePool {
    pub(super) fn new(pages: PagePool, lookback: usize) -> Self {
        let evictable = vec![BTreeSet::new(); pages.ranks()];
        Self { pages, lookback, node_of: HashMap::new(), evictable, released: HashMap::new(), clock: 0 }
    }

    pub(super) fn pages(&self) -> &PagePool {
        &self.pages
    }

    /// Position of the first token that the token after `computed` others sees.
    pub(super) fn first_seen(&self, computed: usize) -> usize {
        computed.saturating_sub(self.lookback)
    }

    /// A page of a rank; if none is free, the one that has been in the prefix cache alone for longest, and the node that loses it.
    pub(super) fn allocate(&mut self, rank: usize) -> Option<(u32, Option<NodeId>)> {
        if let Some(page) = self.pages.allocate(rank) {
            return Some((page, None));
        }
        let (_, page) = *self.evictable[rank].first()?;
        let node = self.evict(rank, page);
        Some((self.pages.allocate(rank)?, node))
    }

    /// Adds a holder to a page that is used or cached.
    pub(super) fn hold(&mut self, rank: usize, page: u32) {
        self.pages.hold(rank, page);
        self.unlist(rank, page);
    }

    /// Removes a holder.
    pub(super) fn release(&mut self, rank: usize, page: u32) {
        if self.pages.release(rank, page) && self.node_of.contains_key(&(rank, page)) {
            self.clock += 1;
            self.released.insert((rank, page), self.clock);
            self.evictable[rank].insert((self.clock, page));
        }
    }

    /// Puts a page that a sequence holds into a node of the prefix cache.
    pub(super) fn mark_cached(&mut self, rank: usize, page: u32, node: NodeId) {
        self.pages.mark_cached(rank, page);
        self.node_of.insert((rank, page), node);
    }

    /// Frees a page that only the prefix cache has; returns its node.
    pub(super) fn evict(&mut self, rank: usize, page: u32) -> Option<NodeId> {
        self.unlist(rank, page);
        self.pages.evict(rank, page);
        self.node_of.remove(&(rank, page))
    }

    /// Takes a page out of the prefix cache; the sequence that holds it goes on holding it.
    pub(super) fn uncache(&mut self, rank: usize, page: u32) {
        self.pages.uncache(rank, page);
        self.node_of.remove(&(rank, page));
    }

    fn unlist(&mut self, rank: usize, page: u32) {
        if let Some(at) = self.released.remove(&(rank, page)) {
            self.evictable[rank].remove(&(at, page));
        }
    }

    /// Panics if pages and lists do not agree; `node_has` says which page a node has.
    #[cfg(test)]
    pub(super) fn check(&self, node_has: impl Fn(NodeId) -> (usize, Option<u32>)) {
        self.pages.check();
        for (&(rank, page), &node) in &self.node_of {
            assert_eq!(node_has(node), (rank, Some(page)));
            assert_eq!(self.released.contains_key(&(rank, page)), !self.pages.is_held(rank, page));
        }
        assert_eq!(self.released.len(), self.evictable.iter().map(BTreeSet::len).sum::<usize>());
        assert!(self.released.keys().all(|page| self.node_of.contains_key(page)));
    }
}
