//! Decides which shard of each parameter a rank computes with, where ranks share the width of layers (tensor parallelism) and
//! the experts (expert parallelism).

mod error;
mod heads;
mod partition;
mod rank;

pub use error::ShardError;
pub use heads::{HeadCounts, Heads};
pub use partition::Partition;
pub use rank::{ParallelRank, ReplicaGroup};

use crate::tensor_parallel::part;
use std::ops::Range;

/// How ranks shard a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardSpec {
    /// Each rank holds the whole parameter.
    Replicated,
    /// Each rank that holds this expert, or a shard of it, holds the whole parameter.
    OfExpert(ExpertIndex),
    /// Each rank holds some rows of a matrix, or elements of a vector.
    Rows(Split),
    /// Each rank holds some columns of a matrix.
    Columns(Split),
    /// Each rank holds some rows of each of several matrices that are concatenated in one.
    Stacked(Stack),
    /// A tensor of all experts of a layer, in its first dim: each rank holds some experts, whole or sharded in their width.
    Experts(Option<WidthDim>),
}

/// The dim of a tensor of all experts that is their width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WidthDim {
    /// The index of the dim.
    pub dim: usize,
    /// Number of neighbouring elements that belong together: 2 where gate and up alternate.
    pub each: usize,
}

/// Up to three matrices, or vectors, concatenated by rows: the number of rows of each, and how they are distributed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stack([(usize, Split); 3]);

impl Stack {
    /// The concatenation of matrices in this order.
    #[must_use]
    pub fn new<const N: usize>(parts: [(usize, Split); N]) -> Self {
        const { assert!(N <= 3, "a stack of at most three matrices") };
        let mut all = [(0, Split::Even("rows")); 3];
        all[..N].copy_from_slice(&parts);
        Self(all)
    }

    /// The number of rows of all matrices together.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.0.iter().map(|(rows, _)| rows).sum()
    }

    fn parts(&self) -> impl Iterator<Item = (usize, Split)> {
        self.0.into_iter().filter(|(rows, _)| *rows > 0)
    }
}

/// How a dim is distributed over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Consecutive parts whose sizes differ by one at most. The name is that of the dim in the model's configuration.
    Even(&'static str),
    /// Whole query heads of this width, in elements.
    QueryHeads(HeadCounts, usize),
    /// Whole key-value heads of this width, in elements.
    KeyValueHeads(HeadCounts, usize),
    /// The width of this expert.
    ExpertWidth(ExpertIndex),
}

/// One expert of a layer with several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertIndex {
    /// The index of the expert.
    pub index: usize,
    /// The number E of experts in the layer.
    pub experts: usize,
}

impl ExpertIndex {
    fn is_on(self, (rank, ranks): (usize, usize)) -> bool {
        part(self.experts, rank, ranks).contains(&self.index)
    }
}

impl ShardSpec {
    /// Whether expert-parallel ranks hold different parts of the parameter.
    #[must_use]
    pub fn is_of_experts(&self) -> bool {
        match self {
            Self::OfExpert(_) | Self::Experts(_) => true,
            Self::Rows(split) | Self::Columns(split) => matches!(split, Split::ExpertWidth(_)),
            Self::Replicated | Self::Stacked(_) => false,
        }
    }

    /// How ranks shard the matrices A and B of an adapter, if the layer's weight has this shard spec: the matrix that
    /// has the weight's sharded dimension is sharded likewise.
    #[must_use]
    pub fn of_adapter(self) -> [Self; 2] {
        let whole = match self {
            Self::Rows(Split::ExpertWidth(expert)) | Self::Columns(Split::ExpertWidth(expert)) => {
                Self::OfExpert(expert)
            }
            _ => Self::Replicated,
        };
        match self {
            Self::Columns(_) => [self, whole],
            Self::Rows(_) | Self::Stacked(_) => [whole, self],
            Self::Replicated | Self::OfExpert(_) | Self::Experts(_) => [self, self],
        }
    }

    /// The partitions that a rank holds of a parameter of this shape: one, none of an expert of other ranks, or several if the
    /// parameter concatenates matrices.
    ///
    /// # Errors
    /// More ranks than the heads can be distributed over.
    pub fn partitions(&self, name: &str, whole: &[usize], rank: ParallelRank) -> Result<Vec<Partition>, ShardError> {
        match self {
            // Without tensor parallelism, the rank holds the parameter as it is stored.
            Self::Stacked(_) if rank.tp.1 == 1 => Self::Replicated.partitions(name, whole, rank),
            Self::Stacked(stack) => {
                let (mut all, mut before, mut here) = (Vec::new(), 0, 0);
                for (rows, split) in stack.parts() {
                    let of_part = [&[rows], &whole[1..]].concat();
                    for partition in Self::Rows(split).partitions(name, &of_part, rank)? {
                        let rows = before + partition.rows.start..before + partition.rows.end;
                        let stacked_at = Some(here);
                        here += rows.len();
                        all.push(Partition { whole: whole.to_vec(), rows, stacked_at, ..partition });
                    }
                    before += rows;
                }
                Ok(all)
            }
            Self::Experts(width) => Ok(vec![of_experts(*width, name, whole, rank)]),
            _ => Ok(self.partition(name, whole, rank)?.into_iter().collect()),
        }
    }

    fn partition(&self, name: &str, whole: &[usize], rank: ParallelRank) -> Result<Option<Partition>, ShardError> {
        let (all, width) = (0..whole[0], 0..whole[1..].iter().product());
        let size = match self {
            Self::Columns(_) => width.end,
            _ => all.end,
        };
        let Some((range, replicas)) = self.range(size, rank)? else { return Ok(None) };
        let (rows, columns) = match self {
            Self::Columns(_) => (all, range),
            _ => (range, width),
        };
        let (name, whole) = (name.to_owned(), whole.to_vec());
        Ok(Some(Partition { name, whole, dim: 1, rows, columns, stacked_at: None, replicas }))
    }

    /// This rank's range of the dim that is distributed, and the replica group; `None` for an expert of other ranks.
    fn range(&self, size: usize, rank: ParallelRank) -> Result<Option<(Range<usize>, ReplicaGroup)>, ShardError> {
        let ParallelRank { tp, ep, moe_tp } = rank;
        // Without tensor parallelism, all ranks hold the same.
        let own = if tp.1 == 1 { ReplicaGroup::All } else { ReplicaGroup::Tensor(tp.0) };
        let wide = |heads: Range<usize>, dim: usize| heads.start * dim..heads.end * dim;
        Ok(Some(match self {
            Self::Replicated | Self::Stacked(_) => (0..size, ReplicaGroup::All),
            Self::OfExpert(expert) if !expert.is_on(ep) => return Ok(None),
            Self::OfExpert(_) => (0..size, ReplicaGroup::of_experts(rank, false)),
            Self::Experts(width) => (0..size, ReplicaGroup::of_experts(rank, width.is_some())),
            Self::Rows(split) | Self::Columns(split) => match *split {
                Split::Even(_) => (part(size, tp.0, tp.1), own),
                Split::QueryHeads(heads, dim) => (wide(heads.of_rank(tp)?.queries, dim), own),
                Split::KeyValueHeads(heads, dim) => {
                    let of_rank = heads.of_rank(tp)?.key_values;
                    let shared = tp.1 > heads.key_values;
                    let replicas = if shared { ReplicaGroup::KeyValueHead(of_rank.start) } else { own };
                    (wide(of_rank, dim), replicas)
                }
                Split::ExpertWidth(expert) if !expert.is_on(ep) => return Ok(None),
                Split::ExpertWidth(_) => (part(size, moe_tp.0, moe_tp.1), ReplicaGroup::of_experts(rank, true)),
            },
        }))
    }

    /// Checks that a parameter of this shape can be distributed over so many ranks.
    ///
    /// # Errors
    /// A dim that is too small; the error names the numbers.
    pub fn check(&self, whole: &[usize], rank: ParallelRank) -> Result<(), ShardError> {
        let ParallelRank { tp: (_, tp), ep: (_, ep), moe_tp: (_, moe_tp) } = rank;
        let (split, size) = match self {
            Self::Replicated | Self::OfExpert(_) => return Ok(()),
            Self::Stacked(stack) => {
                let one = |(rows, split): (usize, Split)| Self::Rows(split).check(&[rows], rank);
                return stack.parts().try_for_each(one);
            }
            Self::Experts(width) => {
                let expert = Split::ExpertWidth(ExpertIndex { index: 0, experts: whole[0] });
                let size = width.map_or(moe_tp, |WidthDim { dim, each }| whole[dim] / each);
                return Self::Rows(expert).check(&[size], rank);
            }
            Self::Rows(split) => (split, whole[0]),
            Self::Columns(split) => (split, whole.get(1).copied().unwrap_or(1)),
        };
        match *split {
            Split::Even(what) if tp > size => Err(ShardError::Tensor(format!("{tp} ranks cannot share {what} {size}"))),
            Split::QueryHeads(heads, _) | Split::KeyValueHeads(heads, _) => heads.of_rank((0, tp)).map(drop),
            Split::ExpertWidth(ExpertIndex { experts, .. }) if ep > experts => {
                Err(ShardError::Expert(format!("ep {ep} leaves ranks without one of the {experts} experts")))
            }
            Split::ExpertWidth(_) if moe_tp > size => {
                Err(ShardError::Expert(format!("{moe_tp} ranks cannot share the width {size} of an expert")))
            }
            Split::Even(_) | Split::ExpertWidth(_) => Ok(()),
        }
    }
}

/// This rank's partition of a tensor of all experts.
fn of_experts(width: Option<WidthDim>, name: &str, whole: &[usize], rank: ParallelRank) -> Partition {
    let ParallelRank { ep, moe_tp, .. } = rank;
    let WidthDim { dim, each } = width.unwrap_or(WidthDim { dim: 1, each: 1 });
    let (in_row, trailing) = (whole[1..dim].iter().product::<usize>(), whole[dim + 1..].iter().product::<usize>());
    let own = match width {
        Some(_) => part(whole[dim] / each, moe_tp.0, moe_tp.1),
        None => 0..whole[dim] / each,
    };
    let experts = part(whole[0], ep.0, ep.1);
    Partition {
        name: name.to_owned(),
        whole: whole.to_vec(),
        dim,
        rows: experts.start * in_row..experts.end * in_row,
        columns: own.start * each * trailing..own.end * each * trailing,
        stacked_at: None,
        replicas: ReplicaGroup::of_experts(rank, width.is_some()),
    }
}

/// The replica groups to which a rank belongs, for parameters with these specifications, in an order that is equal on all
/// ranks.
///
/// # Errors
/// More ranks than the heads can be distributed over.
pub fn replica_groups<'a>(
    specs: impl Iterator<Item = &'a ShardSpec>,
    rank: ParallelRank,
) -> Result<Vec<ReplicaGroup>, ShardError> {
    let mut all = vec![ReplicaGroup::All];
    let rows = |spec: &ShardSpec| match spec {
        ShardSpec::Stacked(stack) => stack.parts().map(|(_, split)| ShardSpec::Rows(split)).collect(),
        _ => vec![*spec],
    };
    for spec in specs.flat_map(rows) {
        // The group does not depend on the expert, as long as this rank holds it; so the first one on this rank is asked for.
        let first =
            |expert: ExpertIndex| ExpertIndex { index: part(expert.experts, rank.ep.0, rank.ep.1).start, ..expert };
        let own = match spec {
            ShardSpec::OfExpert(expert) => ShardSpec::OfExpert(first(expert)),
            ShardSpec::Rows(Split::ExpertWidth(expert)) => ShardSpec::Rows(Split::ExpertWidth(first(expert))),
            ShardSpec::Columns(Split::ExpertWidth(expert)) => ShardSpec::Columns(Split::ExpertWidth(first(expert))),
            other => other,
        };
        if let Some((_, group)) = own.range(0, rank)?
            && !all.contains(&group)
        {
            all.push(group);
        }
    }
    // Ranks may meet parameters in another order, but all find the same kinds of groups.
    all.sort();
    Ok(all)
}
