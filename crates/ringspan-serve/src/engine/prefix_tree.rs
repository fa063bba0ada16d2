//! The radix tree of the prefix cache, keyed by the tokens whose keys and values are in a page.
//!
//! A node is one page of one text: its depth is the page's index in the text, and so says which rank has it. Children of a node
//! continue its text; only full pages have children. The tokens of siblings differ, and none is a prefix of another, so the
//! neighbours of a text in the order of tokens are those with which it has most tokens in common.

use std::collections::{BTreeMap, HashMap};
use std::ops::{Bound, Index, IndexMut};
use std::sync::Arc;

/// A node of the tree, valid while it is held or not evicted.
pub(super) type NodeId = usize;

/// The weights of a text: the base model's, or those of an adapter.
pub(super) type AdapterSlot = Option<u64>;

/// Texts that may share pages: those that were computed with the same weights, and whose clients gave the same salt or none. Each
/// namespace has a tree of its own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Namespace {
    pub(super) adapter: AdapterSlot,
    /// Keeps texts of other clients from being found, and so from being guessed by how fast an answer begins.
    pub(super) salt: Option<Arc<str>>,
}

impl From<AdapterSlot> for Namespace {
    fn from(adapter: AdapterSlot) -> Self {
        Self { adapter, salt: None }
    }
}

/// A page of a text.
#[derive(Debug)]
pub(super) struct Node {
    /// `None` for a root, which has no page.
    pub(super) parent: Option<NodeId>,
    pub(super) tokens: Box<[u32]>,
    pub(super) rank: usize,
    pub(super) page: u32,
    /// Its page in the sliding-window layers, as long as it is there.
    pub(super) window: Option<u32>,
    /// Index of the page in the text, plus 1; 0 for a root.
    pub(super) depth: usize,
    pub(super) children: BTreeMap<Box<[u32]>, NodeId>,
    pub(super) last_used: u64,
}

/// The texts of all namespaces, page by page.
#[derive(Debug, Default)]
pub(super) struct PrefixTree {
    nodes: Vec<Node>,
    unused: Vec<NodeId>,
    roots: HashMap<Namespace, NodeId>,
    /// The namespace of each root.
    namespaces: HashMap<NodeId, Namespace>,
}

impl PrefixTree {
    /// The roots of all namespaces.
    pub(super) fn roots(&self) -> impl Iterator<Item = (&Namespace, NodeId)> {
        self.roots.iter().map(|(namespace, root)| (namespace, *root))
    }

    /// The root of a namespace, if there is one.
    pub(super) fn find_root(&self, namespace: &Namespace) -> Option<NodeId> {
        self.roots.get(namespace).copied()
    }

    /// The root of a namespace.
    pub(super) fn root(&mut self, namespace: &Namespace) -> NodeId {
        if let Some(root) = self.find_root(namespace) {
            return root;
        }
        let (tokens, children) = (Box::default(), BTreeMap::new());
        let root =
            self.add(Node { parent: None, tokens, rank: 0, page: 0, window: None, depth: 0, children, last_used: 0 });
        self.roots.insert(namespace.clone(), root);
        self.namespaces.insert(root, namespace.clone());
        root
    }

    /// Removes a root that has no texts any more: clients choose salts, so their number has no limit.
    pub(super) fn remove_empty_root(&mut self, root: NodeId) {
        if self[root].children.is_empty()
            && let Some(namespace) = self.namespaces.remove(&root)
        {
            self.roots.remove(&namespace);
            self.remove(root);
        }
    }

    /// The nodes of the full pages of `page` tokens with which a text begins.
    pub(super) fn full_pages(&self, root: NodeId, tokens: &[u32], page: usize) -> Vec<NodeId> {
        let (mut node, mut path) = (root, Vec::new());
        for tokens in tokens.chunks_exact(page) {
            let Some(&child) = self[node].children.get(tokens) else { break };
            node = child;
            path.push(node);
        }
        path
    }

    /// The child of `node` that has most first tokens in common with `tokens`, and their number, if there is one.
    pub(super) fn most_in_common(&self, node: NodeId, tokens: &[u32]) -> Option<(NodeId, usize)> {
        let children = &self[node].children;
        let below = children.range::<[u32], _>((Bound::Unbounded, Bound::Excluded(tokens))).next_back();
        let above = children.range::<[u32], _>((Bound::Included(tokens), Bound::Unbounded)).next();
        let common = |key: &[u32]| key.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let both = below.into_iter().chain(above).map(|(key, node)| (*node, common(key)));
        both.filter(|(_, rows)| *rows > 0).max_by_key(|(_, rows)| *rows)
    }

    /// Whether the tokens of a child begin with `tokens`.
    pub(super) fn has_longer_child(&self, node: NodeId, tokens: &[u32]) -> bool {
        let above = self[node].children.range::<[u32], _>((Bound::Included(tokens), Bound::Unbounded)).next();
        above.is_some_and(|(key, _)| key.starts_with(tokens))
    }

    /// The child with whose tokens `tokens` begin, if there is one.
    pub(super) fn shorter_child(&self, node: NodeId, tokens: &[u32]) -> Option<NodeId> {
        let below = self[node].children.range::<[u32], _>((Bound::Unbounded, Bound::Excluded(tokens))).next_back();
        below.filter(|(key, _)| tokens.starts_with(key)).map(|(_, child)| *child)
    }

    /// Adds a node, also to its parent's children.
    pub(super) fn add(&mut self, node: Node) -> NodeId {
        let (parent, tokens) = (node.parent, node.tokens.clone());
        let id = match self.unused.pop() {
            Some(id) => {
                self.nodes[id] = node;
                id
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        };
        if let Some(parent) = parent {
            self[parent].children.insert(tokens, id);
        }
        id
    }

    /// Removes a node without children.
    pub(super) fn remove(&mut self, node: NodeId) {
        self[node].window = None;
        let tokens = std::mem::take(&mut self[node].tokens);
        if let Some(parent) = self[node].parent {
            self[parent].children.remove(&tokens);
        }
        self.unused.push(node);
    }
}

impl Index<NodeId> for PrefixTree {
    type Output = Node;

    fn index(&self, node: NodeId) -> &Node {
        &self.nodes[node]
    }
}

impl IndexMut<NodeId> for PrefixTree {
    fn index_mut(&mut self, node: NodeId) -> &mut Node {
        &mut self.nodes[node]
    }
}
