//! What attention of a video to itself costs on a ring x Ulysses grid, compared over all grids of as many ranks.

use crate::error::Result;
use crate::transformer::{WanConfig, WeightType};
use ringspan::mesh::Grid;
use ringspan::schedule::{HeadShare, Pass, TensorSizes};
use ringspan::{Documents, Layout, LayoutKind, Mask, Schedule, StrategyKind};
use std::fmt;

/// A grid with at most so many percent of the work is worth a word, whatever it sends.
const LESS_WORK_PERCENT: u64 = 90;
/// A grid with no more work is worth a word if it sends at most so many percent of the bytes.
const FEWER_BYTES_PERCENT: u64 = 70;

/// The cost of attention in one block, to the tokens of all ranks. All other work of a rank is that of its own tokens, which are as
/// many on every grid of as many ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GridCost {
    /// The grid.
    pub grid: Grid,
    /// Work of the busiest rank: the queries of its ring rank, times its heads. Each meets the keys of its whole video.
    pub work: u64,
    /// Bytes that the rank which sends most sends.
    pub bytes: u64,
}

impl GridCost {
    /// The cost on a grid.
    ///
    /// # Errors
    /// A grid without ranks, or with more Ulysses ranks than heads.
    pub fn new(config: &WanConfig, weights: WeightType, batch: usize, tokens: usize, grid: Grid) -> Result<Self> {
        let (heads, dim) = (config.num_attention_heads, config.attention_head_dim);
        let shares = HeadShare::all(heads, heads, grid)?;
        let documents = Documents::batch(batch, tokens);
        let ranks = grid.size().unwrap_or(usize::MAX);
        let layout = Layout::new(LayoutKind::Contiguous, &documents, ranks)?;
        let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::full(), grid)?;
        let wire = weights.computed_bytes();
        let sizes = TensorSizes { heads, kv_heads: heads, dim, v_dim: dim, wire, bias_heads: 0 };
        let mut bytes = 0;
        for rank in 0..ranks {
            bytes = bytes.max(schedule.bytes_sent(Pass::Forward, rank, &sizes)?);
        }
        let most_heads = shares.iter().map(|share| share.query.len()).max().unwrap_or(0);
        let of_ring_rank = |members: &Vec<usize>| members.iter().map(|rank| layout.tokens(*rank)).sum::<usize>();
        let queries = grid.members().iter().map(of_ring_rank).max().unwrap_or(0);
        Ok(Self { grid, work: (queries * most_heads) as u64, bytes })
    }

    /// The costs on all grids of so many ranks.
    ///
    /// # Errors
    /// No rank.
    pub fn all(
        config: &WanConfig,
        weights: WeightType,
        batch: usize,
        tokens: usize,
        ranks: usize,
    ) -> Result<Vec<Self>> {
        let sizes = (1..=ranks.min(config.num_attention_heads)).filter(|ulysses| ranks.is_multiple_of(*ulysses));
        sizes.map(|ulysses| Self::new(config, weights, batch, tokens, Grid::new(ranks / ulysses, ulysses))).collect()
    }

    /// The grid among `others` that is worth a word beside this one: with clearly less work or else, among those with no more work, the
    /// one with clearly fewer bytes.
    #[must_use]
    pub fn alternative(self, others: &[Self]) -> Option<GridAlternative> {
        let at_most = |percent: u64, part: u64, whole: u64| part * 100 <= whole * percent;
        let least_work = others.iter().min_by_key(|other| (other.work, other.bytes));
        let least_work = least_work.filter(|other| at_most(LESS_WORK_PERCENT, other.work, self.work));
        let fewest_bytes = || {
            let no_more_work = others.iter().filter(|other| other.work <= self.work);
            let fewest = no_more_work.min_by_key(|other| (other.bytes, other.work));
            fewest.filter(|other| other.bytes < self.bytes && at_most(FEWER_BYTES_PERCENT, other.bytes, self.bytes))
        };
        least_work.or_else(fewest_bytes).map(|other| GridAlternative { given: self, other: *other })
    }
}

/// A grid that may be better than the given one, which prints what it would change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GridAlternative {
    given: GridCost,
    /// The other grid, and its cost.
    pub other: GridCost,
}

impl fmt::Display for GridAlternative {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { given, other } = self;
        let (ring, ulysses) = (other.grid.ring, other.grid.ulysses);
        let times = |other: u64, given: u64| match other == given {
            true => "as much".to_owned(),
            false => format!("{:.2} times as much", other as f64 / given.max(1) as f64),
        };
        let (work, bytes) = (times(other.work, given.work), times(other.bytes, given.bytes));
        let joined = if other.bytes > given.bytes { "but" } else { "and" };
        write!(
            f,
            "as ring {ring} x ulysses {ulysses}, the busiest rank would compute {work} in attention, {joined} send up to {bytes}"
        )
    }
}
