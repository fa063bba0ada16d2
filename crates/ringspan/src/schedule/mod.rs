//! Strategies as data: who computes which tiles when, and which blocks move meanwhile.
//!
//! A context-parallel group of P = R x U ranks is read as R *ring ranks* of U neighbours each (ring outer, Ulysses
//! inner). Inside a ring rank an all-to-all turns tokens into heads, so its members share the same tokens and the same
//! [`Plan`], each for its own heads. A strategy is a generator of plans; one executor runs any of them.

mod all_gather;
mod display;
mod heads;
mod ring;

pub use heads::HeadShare;

use crate::error::{Error, Result};
use crate::kernel::Tile;
use crate::layout::{Layout, Run};
use crate::mask::Mask;
use std::collections::HashMap;
use std::str::FromStr;

/// How keys and values reach the queries that see them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Blocks pass from rank to rank, one step behind the computation (Liu et al., 2023). Two blocks in memory.
    Ring,
    /// Every block goes to all ranks that see it at once (Llama 3, 2024). All of them in memory.
    AllGather,
}

/// What moves between ring ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Block {
    /// Keys and values of a ring rank, as one message, in the wire type.
    Keys(usize),
    /// What some ranks have added to the gradients of the keys and values of a ring rank, in f32.
    Gradients(usize),
}

/// A block on its way to or from a ring rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// What moves.
    pub block: Block,
    /// The other ring rank.
    pub peer: usize,
}

/// The tiles of this rank's queries against one block of keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compute {
    /// The ring rank whose keys these are.
    pub owner: usize,
    /// What is visible; rows are local to the ring rank of the queries and to the owner of the keys.
    pub tiles: Vec<Tile>,
}

impl Compute {
    /// Visible pairs, for one head.
    pub fn pairs(&self) -> u64 {
        self.tiles.iter().map(|tile| tile.band.pairs(tile.q.len(), tile.k.len())).sum()
    }
}

/// One step: start `send` and `receive`, compute, wait for what was received, then send `after`.
///
/// Keys are received at least a step before they are needed; gradients in the step that adds to them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Step {
    /// Sends started before the computation.
    pub send: Vec<Transfer>,
    /// Receives started before the computation and waited for after it.
    pub receive: Vec<Transfer>,
    /// What is computed.
    pub compute: Option<Compute>,
    /// Sends of what this step made.
    pub after: Vec<Transfer>,
}

impl Step {
    fn is_empty(&self) -> bool {
        self.send.is_empty() && self.receive.is_empty() && self.compute.is_none() && self.after.is_empty()
    }
}

/// The steps of one ring rank, in order.
pub type Plan = Vec<Step>;

/// A strategy for one attention, made concrete for a layout and a mask.
#[derive(Debug, Clone)]
pub struct Schedule {
    strategy: Strategy,
    mask: Mask,
    ring: usize,
    ulysses: usize,
    /// Layouts of all ranks, and of the ring ranks.
    query: Layout,
    key: Layout,
    query_groups: Layout,
    key_groups: Layout,
    /// Key runs of each ring rank by document, with their first row.
    key_runs: Vec<HashMap<usize, Vec<(usize, Run)>>>,
    /// `visible[q][k]`: whether ring rank q sees any key of ring rank k.
    visible: Vec<Vec<bool>>,
}

impl Schedule {
    /// Plans attention of queries in layout `query` over keys in layout `key` on `ring x ulysses` ranks.
    ///
    /// # Errors
    /// Layouts of another number of ranks or documents, or with runs that do not pair up.
    pub fn new(
        strategy: Strategy,
        query: &Layout,
        key: &Layout,
        mask: &Mask,
        ring: usize,
        ulysses: usize,
    ) -> Result<Self> {
        let ranks = query.ranks();
        if ring.checked_mul(ulysses) != Some(ranks) || key.ranks() != ranks {
            return Err(Error::MeshSize {
                mesh: format!("ring {ring} x ulysses {ulysses} (queries on {ranks} ranks, keys on {})", key.ranks()),
                needed: ring.saturating_mul(ulysses),
                ranks,
            });
        }
        if query.documents().len() != key.documents().len() {
            return Err(Error::Documents(format!(
                "{} documents of queries do not pair with {} of keys",
                query.documents().len(),
                key.documents().len()
            )));
        }
        let (query_groups, key_groups) = (query.grouped(ulysses)?, key.grouped(ulysses)?);
        let key_runs = (0..ring).map(|rank| by_document(key_groups.runs(rank))).collect();
        let mut schedule = Self {
            strategy,
            mask: *mask,
            ring,
            ulysses,
            query: query.clone(),
            key: key.clone(),
            query_groups,
            key_groups,
            key_runs,
            visible: Vec::new(),
        };
        for q in 0..ring {
            let row = (0..ring).map(|k| schedule.find_tiles(q, k, 1).map(|tiles| !tiles.is_empty()));
            schedule.visible.push(row.collect::<Result<_>>()?);
        }
        // Every pair of runs is looked at once here, so that later calls cannot fail.
        for q in 0..ring {
            for k in 0..ring {
                schedule.find_tiles(q, k, usize::MAX)?;
            }
        }
        Ok(schedule)
    }

    /// The strategy.
    pub fn strategy(&self) -> Strategy {
        self.strategy
    }

    /// The mask.
    pub fn mask(&self) -> Mask {
        self.mask
    }

    /// Size R of the ring axis.
    pub fn ring(&self) -> usize {
        self.ring
    }

    /// Size U of the Ulysses axis.
    pub fn ulysses(&self) -> usize {
        self.ulysses
    }

    /// Who holds which queries, rank by rank.
    pub fn query(&self) -> &Layout {
        &self.query
    }

    /// Who holds which keys, rank by rank.
    pub fn key(&self) -> &Layout {
        &self.key
    }

    /// Who holds which queries, ring rank by ring rank.
    pub fn query_groups(&self) -> &Layout {
        &self.query_groups
    }

    /// Who holds which keys, ring rank by ring rank.
    pub fn key_groups(&self) -> &Layout {
        &self.key_groups
    }

    /// The steps of a ring rank's forward pass.
    pub fn forward(&self, ring_rank: usize) -> Plan {
        self.without_empty_steps(match self.strategy {
            Strategy::Ring => ring::forward(self, ring_rank),
            Strategy::AllGather => all_gather::forward(self, ring_rank),
        })
    }

    /// The steps of a ring rank's backward pass.
    pub fn backward(&self, ring_rank: usize) -> Plan {
        self.without_empty_steps(match self.strategy {
            Strategy::Ring => ring::backward(self, ring_rank),
            Strategy::AllGather => all_gather::backward(self, ring_rank),
        })
    }

    /// Visible pairs that `rank` of the P ranks computes forward, for one head.
    pub fn pairs(&self, rank: usize) -> u64 {
        let computed = self.forward(rank / self.ulysses.max(1));
        computed.iter().filter_map(|step| step.compute.as_ref()).map(Compute::pairs).sum()
    }

    /// Blocks of keys, and of gradients, that a ring rank sends forward and backward: counts of key rows, by kind.
    pub fn rows_sent(&self, ring_rank: usize) -> RowsSent {
        let mut rows = RowsSent::default();
        for step in self.forward(ring_rank) {
            for transfer in step.send.iter().chain(&step.after) {
                if let Block::Keys(owner) = transfer.block {
                    rows.forward_keys += self.key_groups.tokens(owner);
                }
            }
        }
        for step in self.backward(ring_rank) {
            for transfer in step.send.iter().chain(&step.after) {
                match transfer.block {
                    Block::Keys(owner) => rows.backward_keys += self.key_groups.tokens(owner),
                    Block::Gradients(owner) => rows.backward_gradients += self.key_groups.tokens(owner),
                }
            }
        }
        rows
    }

    /// Whether ring rank `q` sees any key of ring rank `k`.
    fn sees(&self, q: usize, k: usize) -> bool {
        self.visible[q][k]
    }

    /// The ring ranks other than `owner` that see its keys, nearest first in the direction `walk` leads.
    fn users(&self, owner: usize, walk: impl Fn(usize) -> usize) -> Vec<usize> {
        (1..self.ring).map(walk).filter(|&rank| self.sees(rank, owner)).collect()
    }

    fn compute(&self, q: usize, owner: usize) -> Option<Compute> {
        // `new` has looked at all pairs of runs, so this finds what it found then.
        let tiles = self.find_tiles(q, owner, usize::MAX).unwrap_or_default();
        (!tiles.is_empty()).then_some(Compute { owner, tiles })
    }

    /// Up to `limit` tiles between the queries of ring rank `q` and the keys of ring rank `k`.
    fn find_tiles(&self, q: usize, k: usize, limit: usize) -> Result<Vec<Tile>> {
        let mut tiles = Vec::new();
        let mut q_row = 0;
        for q_run in self.query_groups.runs(q) {
            let extent_q = self.query_groups.documents().get(q_run.document).extent;
            let extent_k = self.key_groups.documents().get(q_run.document).extent;
            for (k_row, k_run) in self.key_runs[k].get(&q_run.document).into_iter().flatten() {
                if let Some(band) = self.mask.band(q_run, k_run, extent_q, extent_k)? {
                    tiles.push(Tile { q: q_row..q_row + q_run.len, k: *k_row..k_row + k_run.len, band });
                    if tiles.len() == limit {
                        return Ok(tiles);
                    }
                }
            }
            q_row += q_run.len;
        }
        Ok(tiles)
    }

    fn without_empty_steps(&self, mut plan: Plan) -> Plan {
        plan.retain(|step| !step.is_empty());
        plan
    }
}

/// Key rows a ring rank sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RowsSent {
    /// Rows of keys and values, forward.
    pub forward_keys: usize,
    /// Rows of keys and values, backward.
    pub backward_keys: usize,
    /// Rows of gradients of keys and values, backward.
    pub backward_gradients: usize,
}

fn by_document(runs: &[Run]) -> HashMap<usize, Vec<(usize, Run)>> {
    let mut map: HashMap<usize, Vec<(usize, Run)>> = HashMap::new();
    let mut row = 0;
    for run in runs {
        map.entry(run.document).or_default().push((row, *run));
        row += run.len;
    }
    map
}

impl std::fmt::Display for Strategy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Ring => "ring",
            Self::AllGather => "all-gather",
        })
    }
}

impl FromStr for Strategy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "ring" => Ok(Self::Ring),
            "all-gather" => Ok(Self::AllGather),
            _ => Err(Error::Unknown { what: "strategy", given: text.to_owned(), possible: "ring, all-gather" }),
        }
    }
}

#[cfg(test)]
mod test;
