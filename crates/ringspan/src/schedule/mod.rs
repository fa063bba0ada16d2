//! Strategies as data: which rank computes which tiles at which step, and which blocks move meanwhile.
//!
//! A context-parallel group of P = R x U ranks is read as R *ring ranks* of U members each ([`Grid`]). Inside a ring
//! rank an all-to-all turns tokens into heads, so its members share the same tokens and the same [`Plan`], each for its
//! own heads. A strategy is a generator of plans; one executor runs any of them.
#![doc = include_str!("strategies.md")]

mod all_gather;
mod bidirectional;
mod display;
mod draw;
mod estimate;
mod full_blocks;
mod heads;
mod merge;
mod pass_q;
mod ring;
mod step;
mod strategy;
mod strategy_choice;
mod strategy_kind;
mod tiles;
mod traffic;
mod validate;
mod visibility;

#[cfg(test)]
mod test;

pub use draw::Cell;
pub use estimate::{Choice, Estimate, Link, Machine};
pub use heads::HeadShare;
pub use merge::{DecodeSchedule, Merge};
pub use step::{Block, Compute, Pass, Plan, RowRanges, Step, Transfer, Transfers};
pub use strategy::Strategy;
pub use strategy_choice::StrategyChoice;
pub use strategy_kind::StrategyKind;
pub use traffic::{TensorSizes, Traffic};

pub(crate) use step::list_bytes;
pub(crate) use tiles::Tiling;

use crate::documents::Strand;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::mask::Mask;
use crate::mesh::Grid;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use visibility::Visibility;

/// The plans of all ranks for one attention: a strategy applied to a layout and a mask.
///
/// ```
/// use ringspan::schedule::{Pass, TensorSizes};
/// use ringspan::{Documents, Layout, LayoutKind, Mask, Schedule, StrategyKind};
///
/// // A window of 16 keys over 4 parts of 1,000 tokens: the ring sends whole parts, the halo only what is seen.
/// let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(1, 4000), 4)?;
/// let mask = Mask::causal().window(Some(16), None);
/// let sizes = TensorSizes { heads: 8, kv_heads: 2, dim: 64, v_dim: 64, wire: 2, bias_heads: 0 };
/// let bytes = |strategy| {
///     let schedule = Schedule::new(strategy, &layout, &layout, &mask, (4, 1))?;
///     schedule.validate()?;                        // each visible pair is computed once, and each block that is sent is used
///     schedule.bytes_sent(Pass::Forward, 0, &sizes)
/// };
/// assert_eq!(bytes(StrategyKind::Halo)?, 16 * 2 * (64 + 64) * 2);
/// assert!(bytes(StrategyKind::Ring)? >= 1000 * 2 * (64 + 64) * 2);
/// # Ok::<_, ringspan::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Schedule {
    strategy: Arc<dyn Strategy>,
    mask: Mask,
    grid: Grid,
    head_chunks: usize,
    /// `query` and `key` are the layouts of all P ranks; `query_groups` and `key_groups` are those of the R ring ranks.
    query: Layout,
    key: Layout,
    query_groups: Layout,
    key_groups: Layout,
    /// Key runs of each ring rank, by document.
    key_strands: Vec<HashMap<usize, Vec<Strand>>>,
    /// `query_rows` and `key_rows` are all rows of each ring rank.
    query_rows: Vec<RowRanges>,
    key_rows: Vec<RowRanges>,
    /// Which ring ranks see keys of which others.
    visible: Visibility,
    /// Key rows that a ring rank needs of another, cached by the pair of ring ranks at their first use.
    needed: Arc<Mutex<HashMap<(usize, usize), RowRanges>>>,
}

impl Schedule {
    /// Makes the schedule for queries in layout `query` and keys in layout `key` on the ranks of `grid`.
    ///
    /// # Errors
    /// Layouts with different numbers of ranks or documents, or a mask that does not fit the documents.
    pub fn new(
        strategy: impl Strategy + 'static,
        query: &Layout,
        key: &Layout,
        mask: &Mask,
        grid: impl Into<Grid>,
    ) -> Result<Self> {
        let (ranks, grid) = (query.ranks(), grid.into());
        if grid.size() != Some(ranks) || key.ranks() != ranks {
            return Err(Error::MeshSize {
                mesh: format!("{grid} (queries on {ranks} ranks, keys on {})", key.ranks()),
                needed: grid.size().unwrap_or(usize::MAX),
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
        mask.check(query.documents().len())?;
        let members = grid.members();
        let (query_groups, key_groups) = (query.grouped(&members), key.grouped(&members));
        let rows = |layout: &Layout| (0..grid.ring).map(|rank| RowRanges::all(layout.tokens(rank))).collect();
        Ok(Self {
            strategy: Arc::new(strategy),
            mask: mask.clone(),
            grid,
            head_chunks: 1,
            query: query.clone(),
            key: key.clone(),
            key_strands: (0..grid.ring).map(|rank| Strand::by_document(key_groups.runs(rank))).collect(),
            query_rows: rows(&query_groups),
            key_rows: rows(&key_groups),
            visible: Visibility::new(&query_groups, &key_groups, mask),
            query_groups,
            key_groups,
            needed: Arc::default(),
        })
    }

    /// Lets a Ulysses rank compute its heads in up to `chunks` parts, so that the exchange of one part overlaps the
    /// computation of another. Key-value heads that two parts read are exchanged twice. Without Ulysses, all heads are one
    /// part.
    pub fn with_head_chunks(self, chunks: usize) -> Self {
        Self { head_chunks: chunks.max(1), ..self }
    }

    /// The strategy that generates the plans.
    pub fn strategy(&self) -> &dyn Strategy {
        &*self.strategy
    }

    /// The mask that decides which pairs are visible.
    pub fn mask(&self) -> &Mask {
        &self.mask
    }

    /// The sizes of the ring and Ulysses axes.
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// Number of parts in which a Ulysses rank computes its heads, at most.
    pub fn head_chunks(&self) -> usize {
        self.head_chunks
    }

    /// The layout of the queries over all P ranks.
    pub fn query(&self) -> &Layout {
        &self.query
    }

    /// The layout of the keys over all P ranks.
    pub fn key(&self) -> &Layout {
        &self.key
    }

    /// The layout of the queries over the R ring ranks.
    pub fn query_groups(&self) -> &Layout {
        &self.query_groups
    }

    /// The layout of the keys over the R ring ranks.
    pub fn key_groups(&self) -> &Layout {
        &self.key_groups
    }

    /// The steps of a ring rank, with the tiles of each computation.
    pub fn plan(&self, pass: Pass, ring_rank: usize) -> Plan {
        let mut plan = self.steps(pass, ring_rank);
        for compute in plan.iter_mut().filter_map(|step| step.compute.as_mut()) {
            *compute = self.with_tiles(compute, Tiling::WithPositions);
        }
        plan
    }

    /// The [`plan`](Self::plan) without tiles. Short runs make a hundred thousand tiles in a step, so an executor, which
    /// needs one step at a time, requests [batches](Self::in_batches) of them and drops each after use.
    pub(crate) fn steps(&self, pass: Pass, ring_rank: usize) -> Plan {
        let mut plan = self.strategy.plan(self, pass, ring_rank);
        plan.retain(|step| !step.is_empty());
        plan
    }

    /// Number of visible pairs that `rank` of the P ranks computes forward, for one head.
    pub fn pairs(&self, rank: usize) -> u64 {
        let computed = self.steps(Pass::Forward, self.grid.coordinates(rank).0);
        computed.iter().filter_map(|step| step.compute.as_ref()).map(|compute| self.pairs_of(compute)).sum()
    }

    /// Bytes that a ring rank's plan takes during a pass, without tiles; the plan has a step for each ring rank that it
    /// meets.
    pub fn plan_bytes(&self, pass: Pass, ring_rank: usize) -> u64 {
        list_bytes(&self.steps(pass, ring_rank))
    }

    /// The rows that a ring rank sends to others in one pass.
    pub fn traffic(&self, pass: Pass, ring_rank: usize) -> Traffic {
        Traffic::of(&self.steps(pass, ring_rank))
    }

    /// Whether ring rank `q` sees any key of ring rank `k`.
    pub fn sees(&self, q: usize, k: usize) -> bool {
        self.visible.sees(q, k)
    }

    /// The ring ranks other than `owner` that see its keys, in ascending ring order from `owner` on.
    pub fn users(&self, owner: usize) -> impl Iterator<Item = usize> {
        self.visible.users(owner)
    }

    /// The ring ranks other than `rank` whose keys it sees, in descending ring order from `rank` on.
    pub fn owners(&self, rank: usize) -> impl Iterator<Item = usize> {
        self.visible.owners(rank)
    }

    /// The transfer of all rows of a block to or from ring rank `peer`.
    pub fn transfer(&self, block: Block, peer: usize) -> Transfer {
        let rows = match block {
            Block::Keys(_) | Block::KeyGradients(_) => &self.key_rows,
            _ => &self.query_rows,
        };
        Transfer { block, peer, rows: rows[block.owner()].clone() }
    }

    /// The computation of one ring rank's queries and another's keys, without tiles; `None` if no pair is visible.
    pub fn compute(&self, queries: usize, keys: usize) -> Option<Compute> {
        let rows = self.key_rows[keys].clone();
        self.sees(queries, keys).then_some(Compute { queries, keys, tiles: Vec::new(), rows })
    }
}
