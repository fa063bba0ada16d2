//! The prefix cache: pages whose keys and values later texts with the same beginning use, found by a radix tree.
//!
//! Rows that are in the tree never change. A sequence that continues from the middle of a page copies its first rows.
//!
//! Sliding-window layers have pages of their own, which a node may lose before it is removed. A hit is the longest prefix for which all
//! window pages that the next token attends to are still cached.

use super::page_pool::PagePool;
use super::prefix_tree::{Namespace, Node, NodeId, PrefixTree};
use super::step::{CachePage, WindowPages};
use super::window_page_pool::WindowPagePool;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

/// The tree, and the pages of all ranks, which it keeps or frees.
#[derive(Debug)]
pub(super) struct PrefixCache {
    pages: PagePool,
    /// The pages of sliding-window layers, if there are such layers.
    window: Option<WindowPagePool>,
    /// Tokens of a page.
    page_size: usize,
    enabled: bool,
    tree: PrefixTree,
    /// The node of each page that the tree keeps.
    node_of: HashMap<(usize, u32), NodeId>,
    /// Nodes without children and holders, the least recently used first.
    evictable: BTreeSet<(u64, NodeId)>,
    clock: u64,
}

/// A page that the tree keeps.
#[derive(Debug, Clone, Copy)]
pub(super) struct CachedPage<'a> {
    pub(super) namespace: &'a Namespace,
    /// Index of the page before in the list.
    pub(super) parent: Option<usize>,
    pub(super) tokens: &'a [u32],
    pub(super) rank: usize,
    pub(super) page: CachePage,
    pub(super) last_used: u64,
}

/// The beginning of a text that is in the cache.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Hit {
    /// The full pages.
    pub(super) pages: Vec<u32>,
    /// The node of the last full page.
    pub(super) node: Option<NodeId>,
    /// The page after them, and the number of its first rows that fit.
    pub(super) partial: Option<(u32, usize)>,
    /// In sliding-window layers, the full pages that the next token sees.
    pub(super) window: WindowPages,
    /// The page after them in these layers.
    pub(super) partial_window: Option<u32>,
}

impl PrefixCache {
    /// A tree without texts; a disabled one never keeps a page.
    pub(super) fn new(pages: PagePool, page_size: usize, enabled: bool) -> Self {
        Self {
            pages,
            window: None,
            page_size,
            enabled,
            tree: PrefixTree::default(),
            node_of: HashMap::new(),
            evictable: BTreeSet::new(),
            clock: 0,
        }
    }

    /// Adds pages for sliding-window layers, in which a token attends to at most `lookback` tokens before it.
    pub(super) fn with_window(self, pages: PagePool, lookback: usize) -> Self {
        Self { window: Some(WindowPagePool::new(pages, lookback)), ..self }
    }

    /// The pages of sliding-window layers, if there are such layers.
    pub(super) fn window(&self) -> Option<&WindowPagePool> {
        self.window.as_ref()
    }

    /// Index of the first page of layers with a window that is needed after `computed` tokens.
    pub(super) fn first_in_window(&self, computed: usize) -> usize {
        self.window.as_ref().map_or(0, |window| window.first_seen(computed)) / self.page_size
    }

    /// Tokens of a page.
    pub(super) fn page_size(&self) -> usize {
        self.page_size
    }

    /// All pages of texts, a page after the one before it.
    pub(super) fn cached_pages(&self) -> Vec<CachedPage<'_>> {
        let mut pages: Vec<CachedPage> = Vec::new();
        let roots = self.tree.roots().map(|(namespace, root)| (namespace, root, None));
        let mut open: Vec<(&Namespace, NodeId, Option<usize>)> = roots.collect();
        while let Some((namespace, node, parent)) = open.pop() {
            let Node { tokens, rank, page, window, children, last_used, .. } = &self.tree[node];
            let mut index = parent;
            if !tokens.is_empty() {
                index = Some(pages.len());
                let page = CachePage { full: *page, window: *window };
                pages.push(CachedPage { namespace, parent, tokens, rank: *rank, page, last_used: *last_used });
            }
            open.extend(children.values().map(|child| (namespace, *child, index)));
        }
        pages
    }

    /// Number of uses so far, by which pages are ordered.
    pub(super) fn clock(&self) -> u64 {
        self.clock
    }

    pub(super) fn pages(&self) -> &PagePool {
        &self.pages
    }

    /// Whether it keeps pages.
    pub(super) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// The rank that has page `index` of a sequence.
    pub(super) fn rank_of(&self, index: usize) -> usize {
        index % self.pages.ranks()
    }

    /// Number of the pages of a sequence with these indices that a rank has.
    pub(super) fn pages_on(&self, rank: usize, indices: Range<usize>) -> usize {
        let ranks = self.pages.ranks();
        let before = |end: usize| (end + ranks - 1 - rank) / ranks;
        before(indices.end.max(indices.start)) - before(indices.start)
    }

    /// Looks up the longest beginning of `tokens` from whose end computation can go on, and holds its pages, the partial one included;
    /// in sliding-window layers, those that the next token sees.
    pub(super) fn hold_prefix(&mut self, namespace: &Namespace, tokens: &[u32]) -> Hit {
        let mut hit = Hit::default();
        let Some((path, end)) = self.find_prefix(namespace, tokens) else { return hit };
        self.clock += 1;
        let (full, rows) = (end / self.page_size, end % self.page_size);
        hit.node = full.checked_sub(1).map(|last| path[last]);
        hit.pages = path[..full].iter().map(|node| self.hold_node(*node)).collect();
        hit.window.first = self.first_in_window(end);
        for node in &path[hit.window.first.min(full)..full] {
            hit.window.pages.extend(self.hold_window(*node));
        }
        if rows > 0 {
            hit.partial = Some((self.hold_node(path[full]), rows));
            hit.partial_window = self.hold_window(path[full]);
        }
        hit
    }

    /// The length of the longest beginning of `tokens` from whose end computation can go on.
    pub(super) fn prefix_len(&self, namespace: &Namespace, tokens: &[u32]) -> usize {
        self.find_prefix(namespace, tokens).map_or(0, |(_, end)| end)
    }

    /// The nodes of the longest beginning of `tokens` in the tree, and the number of tokens from whose end computation can go on.
    fn find_prefix(&self, namespace: &Namespace, tokens: &[u32]) -> Option<(Vec<NodeId>, usize)> {
        let root = self.tree.find_root(namespace)?;
        let mut path = self.tree.full_pages(root, tokens, self.page_size);
        let full = path.len();
        let rest = &tokens[full * self.page_size..];
        let last = path.last().copied().unwrap_or(root);
        let partial = self.tree.most_in_common(last, &rest[..rest.len().min(self.page_size)]);
        path.extend(partial.map(|(child, _)| child));
        let end = self.end_of_hit(&path, full * self.page_size + partial.map_or(0, |(_, rows)| rows));
        Some((path, end))
    }

    /// The number of first tokens of a path of nodes, up to `end`, after which all pages are there that the next token sees.
    fn end_of_hit(&self, path: &[NodeId], mut end: usize) -> usize {
        if self.window.is_none() {
            return end;
        }
        loop {
            let mut needed = self.first_in_window(end)..end.div_ceil(self.page_size);
            match needed.rfind(|index| self.tree[path[*index]].window.is_none()) {
                Some(missing) => end = missing * self.page_size,
                None => return end,
            }
        }
    }

    /// Holds the page of a node in sliding-window layers.
    fn hold_window(&mut self, node: NodeId) -> Option<u32> {
        let Node { rank, window: page, .. } = self.tree[node];
        if let (Some(window), Some(page)) = (&mut self.window, page) {
            window.hold(rank, page);
        }
        page
    }

    fn hold_node(&mut self, node: NodeId) -> u32 {
        let (rank, page) = (self.tree[node].rank, self.tree[node].page);
        self.evictable.remove(&(self.tree[node].last_used, node));
        self.tree[node].last_used = self.clock;
        self.pages.hold(rank, page);
        page
    }

    /// Holds the page that has exactly these tokens after `parent` (`None` at the beginning of a text), if there is one, and if it
    /// also has its rows of sliding-window layers where these are asked for.
    pub(super) fn hold_child(
        &mut self,
        namespace: &Namespace,
        parent: Option<NodeId>,
        tokens: &[u32],
        with_window: bool,
    ) -> Option<(NodeId, u32)> {
        let parent = parent.or_else(|| self.tree.find_root(namespace))?;
        let child = *self.tree[parent].children.get(tokens)?;
        if with_window && self.window.is_some() && self.tree[child].window.is_none() {
            return None;
        }
        Some((child, self.hold_node(child)))
    }

    /// Releases page `index` of a sequence.
    pub(super) fn release(&mut self, index: usize, page: u32) {
        let rank = self.rank_of(index);
        if self.pages.release(rank, page)
            && let Some(&node) = self.node_of.get(&(rank, page))
        {
            self.evictable.remove(&(self.tree[node].last_used, node));
            self.tree[node].last_used = self.clock;
            self.note_evictable(node);
        }
    }

    /// Releases page `index` of a sequence in sliding-window layers.
    pub(super) fn release_window(&mut self, index: usize, page: u32) {
        let rank = self.rank_of(index);
        if let Some(window) = &mut self.window {
            window.release(rank, page);
        }
    }

    /// Lists a node that can be evicted.
    fn note_evictable(&mut self, node: NodeId) {
        let Node { parent, children, rank, page, last_used, .. } = &self.tree[node];
        if parent.is_some() && children.is_empty() && !self.pages.is_held(*rank, *page) {
            self.evictable.insert((*last_used, node));
        }
    }

    /// A page for page `index` of a sequence; cached pages are evicted for it, the least recently used first.
    pub(super) fn allocate(&mut self, index: usize) -> Option<u32> {
        let rank = self.rank_of(index);
        loop {
            if let Some(page) = self.pages.allocate(rank) {
                return Some(page);
            }
            if self.pages.cached(rank) == 0 {
                return None;
            }
            let (_, node) = self.evictable.pop_first()?;
            let parent = self.tree[node].parent;
            self.remove(node);
            parent.into_iter().for_each(|parent| self.tree.remove_empty_root(parent));
        }
    }

    /// A page for page `index` in sliding-window layers; if none is free, a node loses its page.
    pub(super) fn allocate_window(&mut self, index: usize) -> Option<u32> {
        let rank = self.rank_of(index);
        let (page, loser) = self.window.as_mut()?.allocate(rank)?;
        if let Some(node) = loser {
            self.tree[node].window = None;
        }
        Some(page)
    }

    /// Removes a node without children whose pages no sequence holds.
    fn remove(&mut self, node: NodeId) {
        let Node { rank, page, window, .. } = self.tree[node];
        if let (Some(pages), Some(page)) = (&mut self.window, window) {
            pages.evict(rank, page);
        }
        self.pages.evict(rank, page);
        self.detach(node);
    }

    /// Takes a node without children, whose pages it has lost, out of the tree.
    fn detach(&mut self, node: NodeId) {
        let Node { parent, rank, page, .. } = self.tree[node];
        self.node_of.remove(&(rank, page));
        self.tree.remove(node);
        if let Some(parent) = parent {
            self.note_evictable(parent);
        }
    }

    /// Leaves page `index` of a text to the only sequence that holds it, which may then overwrite its rows; returns whether that is
    /// possible: the page must be the last of every text that has it.
    pub(super) fn uncache(&mut self, index: usize, page: u32) -> bool {
        let rank = self.rank_of(index);
        let Some(&node) = self.node_of.get(&(rank, page)) else { return false };
        if !self.tree[node].children.is_empty() || self.pages.ref_count(rank, page) > 1 {
            return false;
        }
        if let (Some(pages), Some(page)) = (&mut self.window, self.tree[node].window) {
            pages.uncache(rank, page);
        }
        self.pages.uncache(rank, page);
        let parent = self.tree[node].parent;
        self.detach(node);
        parent.into_iter().for_each(|parent| self.tree.remove_empty_root(parent));
        true
    }

    /// Adds a page that a sequence holds after `parent` (`None` at the beginning of a text). `tokens` are those whose rows are
    /// computed; the page may be full or not, but gets no more rows from this sequence.
    ///
    /// If the tree has the same full page already, the sequence holds that one from now on, and its own is released; a node without a
    /// page in sliding-window layers gets the sequence's. Returns the node and page of the sequence then; `None` for a page that
    /// the tree does not keep.
    pub(super) fn insert(
        &mut self,
        namespace: &Namespace,
        parent: Option<NodeId>,
        tokens: &[u32],
        page: CachePage,
    ) -> Option<(NodeId, CachePage)> {
        if !self.enabled || tokens.is_empty() {
            return None;
        }
        let parent = parent.unwrap_or_else(|| self.tree.root(namespace));
        self.clock += 1;
        let index = self.tree[parent].depth;
        let rank = self.rank_of(index);
        if let Some(&same) = self.tree[parent].children.get(tokens) {
            let mut kept = page;
            if self.tree[same].page != page.full {
                kept.full = self.hold_node(same);
                self.release(index, page.full);
            }
            match (self.tree[same].window, page.window) {
                (Some(there), Some(own)) if there != own => {
                    kept.window = self.hold_window(same);
                    self.release_window(index, own);
                }
                (None, Some(own)) => self.keep_window(same, own),
                _ => {}
            }
            return Some((same, kept));
        }
        if self.tree.has_longer_child(parent, tokens) {
            return None;
        }
        if let Some(shorter) = self.tree.shorter_child(parent, tokens) {
            let (rank, page) = (self.tree[shorter].rank, self.tree[shorter].page);
            if self.pages.is_held(rank, page) {
                // Somebody copies rows of it in the next step.
                return None;
            }
            self.evictable.remove(&(self.tree[shorter].last_used, shorter));
            self.remove(shorter);
        }
        self.pages.mark_cached(rank, page.full);
        let node = self.tree.add(Node {
            parent: Some(parent),
            tokens: tokens.into(),
            rank,
            page: page.full,
            window: None,
            depth: index + 1,
            children: BTreeMap::new(),
            last_used: self.clock,
        });
        self.node_of.insert((rank, page.full), node);
        if let Some(page) = page.window {
            self.keep_window(node, page);
        }
        Some((node, page))
    }

    /// Gives a node a page in sliding-window layers, which a sequence holds.
    fn keep_window(&mut self, node: NodeId, page: u32) {
        if let Some(window) = &mut self.window {
            window.mark_cached(self.tree[node].rank, page, node);
            self.tree[node].window = Some(page);
        }
    }

    /// Panics if nodes, pages and the list of evictable nodes do not agree, a node is held whose parent is not, or a root is empty.
    #[cfg(test)]
    pub(super) fn check(&self) {
        self.pages.check();
        let mut listed = 0;
        for (&(rank, page), &id) in &self.node_of {
            let node = &self.tree[id];
            assert_eq!((node.rank, node.page), (rank, page));
            assert_eq!(node.rank, self.rank_of(node.depth - 1));
            let held = self.pages.is_held(rank, page);
            let evictable = self.evictable.contains(&(node.last_used, id));
            assert_eq!(evictable, !held && node.children.is_empty(), "node {id}");
            listed += usize::from(evictable);
            assert!(node.children.is_empty() || node.tokens.len() == self.page_size, "only full pages have children");
            if let Some(parent) = node.parent.map(|parent| &self.tree[parent]) {
                assert_eq!(parent.children.get(&node.tokens), Some(&id));
                let parent_held = parent.parent.is_none() || self.pages.is_held(parent.rank, parent.page);
                assert!(!held || parent_held, "node {id} is held without its parent");
            }
        }
        assert_eq!(listed, self.evictable.len());
        assert!(self.tree.roots().all(|(_, root)| !self.tree[root].children.is_empty()), "a namespace without texts");
        if let Some(window) = &self.window {
            window.check(|node| (self.tree[node].rank, self.tree[node].window));
            for id in self.node_of.values() {
                let Node { rank, page, window: of_node, .. } = self.tree[*id];
                let held = of_node.is_some_and(|page| window.pages().is_held(rank, page));
                assert!(!held || self.pages.is_held(rank, page), "node {id} is held in a window alone");
            }
        }
    }
}
