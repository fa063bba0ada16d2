//! Decides which shard of each parameter a rank computes with, where ranks share the width of layers (tensor parallelism) and
//! the experts (expert parallelism).

use crate::tensor_parallel::part;
use std::borrow::Cow;
use std::ops::Range;

/// The position of a rank in each group that shares layers, as pairs of its rank in the group and the group's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParallelRank {
    /// The position in the tensor-parallel group.
    pub tp: (usize, usize),
    /// The position in the expert-parallel group, over which whole experts are distributed.
    pub ep: (usize, usize),
    /// The position in the group that shards the width of an expert.
    pub moe_tp: (usize, usize),
}

impl Default for ParallelRank {
    fn default() -> Self {
        Self { tp: (0, 1), ep: (0, 1), moe_tp: (0, 1) }
    }
}

/// The replica group of a parameter: ranks that hold the same portion of it. Its gradient is the sum over them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReplicaGroup {
    /// All ranks.
    All,
    /// The ranks that have this index in their tensor-parallel group.
    Tensor(usize),
    /// The ranks whose query heads use this key-value head, where a tensor-parallel group has more ranks than there are
    /// key-value heads.
    KeyValueHead(usize),
    /// The ranks with this index among those that share experts, counted over whole experts and shards of their width.
    Experts(usize),
    /// The ranks that hold the same experts, whichever shard of their width.
    WholeExperts(usize),
}

impl ReplicaGroup {
    /// The replica group of an expert's parameter on `rank`: of one that is sharded in its width if `of_width`, else of one
    /// that is whole.
    fn of_experts(rank: ParallelRank, of_width: bool) -> Self {
        let ParallelRank { ep, moe_tp, .. } = rank;
        match (ep.1, moe_tp.1, of_width) {
            (1, 1, _) | (1, _, false) => Self::All,
            // The width is not sharded, so matrices and whole parameters of an expert have the same replica group.
            (_, 1, _) => Self::Experts(ep.0),
            (.., true) => Self::Experts(ep.0 * moe_tp.1 + moe_tp.0),
            (.., false) => Self::WholeExperts(ep.0),
        }
    }
}

/// A portion: the part of a parameter that a rank computes with (its tensor- or expert-parallel shard). It is a rectangle of
/// a matrix or a range of a vector; a tensor of more dims is viewed as a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Portion {
    /// The name of the parameter.
    pub name: String,
    /// The shape of the whole parameter.
    pub whole: Vec<usize>,
    /// The dim at which columns begin: the parameter is viewed as a matrix, whose rows are the dims before this one and whose
    /// columns are this dim and those after it.
    pub dim: usize,
    /// The range of rows of the matrix, or of elements of a vector.
    pub rows: Range<usize>,
    /// The range of columns of the matrix; one column for a vector.
    pub columns: Range<usize>,
    /// The first row of this portion in the rank's tensor, if that concatenates several portions.
    pub stacked_at: Option<usize>,
    /// The ranks that hold the same portion.
    pub replicas: ReplicaGroup,
}

impl Portion {
    /// The shape of the portion.
    pub fn shape(&self) -> Vec<usize> {
        let mut shape = self.whole.clone();
        let in_row = self.whole[1..self.dim].iter().product::<usize>().max(1);
        shape[0] = self.rows.len() / in_row;
        if let [_, behind @ ..] = &self.whole[self.dim..] {
            shape[self.dim] = self.columns.len() / behind.iter().product::<usize>().max(1);
        }
        shape
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A key that is different for each portion of a parameter.
    pub fn key(&self) -> Cow<'_, str> {
        match self.stacked_at {
            None => Cow::Borrowed(&self.name),
            Some(row) => Cow::Owned(format!("{} from row {row}", self.name)),
        }
    }

    /// The number of columns of the whole parameter, viewed as a matrix.
    pub fn width(&self) -> usize {
        self.whole[self.dim..].iter().product()
    }
}

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

/// Query heads H, and the key-value heads G that they share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadCounts {
    /// The number H of query heads.
    pub queries: usize,
    /// The number G of key-value heads, of which H is a multiple.
    pub key_values: usize,
}

/// The heads of one rank of a tensor-parallel group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heads {
    /// The range of query heads.
    pub queries: Range<usize>,
    /// The range of key-value heads; neighbouring ranks share one where there are more ranks than key-value heads.
    pub key_values: Range<usize>,
}

/// More ranks than a model can be sharded over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// Heads or a width that cannot be distributed over so many ranks.
    #[error("tensor parallel: {0}")]
    Tensor(String),
    /// Experts or a width of experts that cannot be distributed over so many ranks.
    #[error("expert parallel: {0}")]
    Expert(String),
}

impl HeadCounts {
    /// The heads of rank `rank` of `ranks`: whole groups of query heads with their key-value head if there are at least as
    /// many groups as ranks, else some query heads of one group.
    ///
    /// # Errors
    /// More ranks than the query heads can be distributed over.
    pub fn of_rank(self, (rank, ranks): (usize, usize)) -> Result<Heads, ShardError> {
        let Self { queries: heads, key_values: groups } = self;
        let each = heads / groups;
        if ranks <= groups {
            let key_values = part(groups, rank, ranks);
            return Ok(Heads { queries: key_values.start * each..key_values.end * each, key_values });
        }
        // The ranks that share a key-value head are neighbours.
        let group = rank * groups / ranks;
        let first = |group: usize| (group * ranks).div_ceil(groups);
        let sharing = first(group + 1) - first(group);
        if ranks.div_ceil(groups) > each {
            return Err(ShardError::Tensor(format!(
                "{ranks} ranks cannot share {heads} query heads over {groups} key-value heads: each of these has {each}, so \
                 at most {heads} ranks can, and no more than {each} of them at one"
            )));
        }
        let of_group = part(each, rank - first(group), sharing);
        Ok(Heads { queries: group * each + of_group.start..group * each + of_group.end, key_values: group..group + 1 })
    }
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

    /// How ranks shard the matrices A and B of an adapter of a layer whose weight has this shard spec: the matrix that has the
    /// weight's sharded dimension is sharded likewise.
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

    /// The portions that a rank holds of a parameter of this shape: one, none of an expert of other ranks, or several if the
    /// parameter concatenates matrices.
    ///
    /// # Errors
    /// More ranks than the heads can be distributed over.
    pub fn portions(&self, name: &str, whole: &[usize], rank: ParallelRank) -> Result<Vec<Portion>, ShardError> {
        match self {
            // Without tensor parallelism, the rank holds the parameter as it is stored.
            Self::Stacked(_) if rank.tp.1 == 1 => Self::Replicated.portions(name, whole, rank),
            Self::Stacked(stack) => {
                let (mut all, mut before, mut here) = (Vec::new(), 0, 0);
                for (rows, split) in stack.parts() {
                    let of_part = [&[rows], &whole[1..]].concat();
                    for portion in Self::Rows(split).portions(name, &of_part, rank)? {
                        let rows = before + portion.rows.start..before + portion.rows.end;
                        let stacked_at = Some(here);
                        here += rows.len();
                        all.push(Portion { whole: whole.to_vec(), rows, stacked_at, ..portion });
                    }
                    before += rows;
                }
                Ok(all)
            }
            Self::Experts(width) => Ok(vec![of_experts(*width, name, whole, rank)]),
            _ => Ok(self.portion(name, whole, rank)?.into_iter().collect()),
        }
    }

    fn portion(&self, name: &str, whole: &[usize], rank: ParallelRank) -> Result<Option<Portion>, ShardError> {
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
        Ok(Some(Portion { name, whole, dim: 1, rows, columns, stacked_at: None, replicas }))
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

/// This rank's portion of a tensor of all experts.
fn of_experts(width: Option<WidthDim>, name: &str, whole: &[usize], rank: ParallelRank) -> Portion {
    let ParallelRank { ep, moe_tp, .. } = rank;
    let WidthDim { dim, each } = width.unwrap_or(WidthDim { dim: 1, each: 1 });
    let (in_row, behind) = (whole[1..dim].iter().product::<usize>(), whole[dim + 1..].iter().product::<usize>());
    let own = match width {
        Some(_) => part(whole[dim] / each, moe_tp.0, moe_tp.1),
        None => 0..whole[dim] / each,
    };
    let experts = part(whole[0], ep.0, ep.1);
    Portion {
        name: name.to_owned(),
        whole: whole.to_vec(),
        dim,
        rows: experts.start * in_row..experts.end * in_row,
        columns: own.start * each * behind..own.end * each * behind,
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
