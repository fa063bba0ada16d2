//! Which part of each parameter a rank computes with, where ranks share the width of layers (tensor parallel) and the
//! experts (expert parallel).

use crate::tensor_parallel::part;
use std::borrow::Cow;
use std::ops::Range;

/// Where a rank stands in each way to share a layer: pairs of its rank in the group and the group's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParallelRank {
    /// In the tensor-parallel group.
    pub tp: (usize, usize),
    /// Among the ranks that have whole experts of their own.
    pub ep: (usize, usize),
    /// Among the ranks that share the width of an expert.
    pub moe_tp: (usize, usize),
}

impl Default for ParallelRank {
    fn default() -> Self {
        Self { tp: (0, 1), ep: (0, 1), moe_tp: (0, 1) }
    }
}

/// Which ranks hold the same portion of a parameter. Its gradient is the sum over them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReplicaGroup {
    /// Every rank.
    All,
    /// The ranks that stand at this place in their tensor-parallel group.
    Tensor(usize),
    /// The ranks whose query heads share this key-value head, where there are fewer of these than ranks in the group.
    KeyValueHead(usize),
    /// The ranks that stand at this place among those that share experts.
    Experts(usize),
    /// The ranks that have the same experts, whichever part of their width.
    WholeExperts(usize),
}

impl ReplicaGroup {
    /// The ranks that hold the same of an expert as `rank` does: its part of the width, or what all have that share the width.
    fn of_experts(rank: ParallelRank, of_width: bool) -> Self {
        let ParallelRank { ep, moe_tp, .. } = rank;
        match (ep.1, moe_tp.1, of_width) {
            (1, 1, _) | (1, _, false) => Self::All,
            // The same ranks hold the expert's own matrices, of which no other rank has a part.
            (_, 1, _) => Self::Experts(ep.0),
            (.., true) => Self::Experts(ep.0 * moe_tp.1 + moe_tp.0),
            (.., false) => Self::WholeExperts(ep.0),
        }
    }
}

/// The part of a parameter that a rank computes with: a rectangle of a matrix, or a stretch of a vector. A tensor of more
/// dimensions is seen as a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Portion {
    /// The parameter.
    pub name: String,
    /// Shape of the whole parameter.
    pub whole: Vec<usize>,
    /// The dimension at which columns begin: the parameter is seen as a matrix, whose rows are the dimensions before this one and
    /// whose columns are this one and those behind it.
    pub dim: usize,
    /// Rows of the matrix, elements of a vector.
    pub rows: Range<usize>,
    /// Columns of the matrix; one for a vector.
    pub columns: Range<usize>,
    /// Where a rank's tensor is made of several portions, one behind the other: the row at which this one begins.
    pub stacked_at: Option<usize>,
    /// The ranks that hold the same.
    pub replicas: ReplicaGroup,
}

impl Portion {
    /// Its shape.
    pub fn shape(&self) -> Vec<usize> {
        let mut shape = self.whole.clone();
        let in_row = self.whole[1..self.dim].iter().product::<usize>().max(1);
        shape[0] = self.rows.len() / in_row;
        if let [_, behind @ ..] = &self.whole[self.dim..] {
            shape[self.dim] = self.columns.len() / behind.iter().product::<usize>().max(1);
        }
        shape
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The name of its numbers where several portions of one parameter meet.
    pub fn key(&self) -> Cow<'_, str> {
        match self.stacked_at {
            None => Cow::Borrowed(&self.name),
            Some(row) => Cow::Owned(format!("{} from row {row}", self.name)),
        }
    }

    /// Columns of the whole parameter.
    pub fn width(&self) -> usize {
        self.whole[self.dim..].iter().product()
    }
}

/// How ranks shard a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardSpec {
    /// Each rank holds it whole.
    Replicated,
    /// Each rank that has (part of) this expert holds it whole.
    OfExpert(ExpertIndex),
    /// Each rank has some rows of a matrix, or elements of a vector.
    Rows(Split),
    /// Each rank has some columns of a matrix.
    Columns(Split),
    /// Each rank has some rows of each of several matrices that are stored as one, one behind the other.
    Stacked(Stack),
    /// One tensor of all experts of a layer, its first dimension: each rank has some of them, and of these all or a part.
    Experts(Option<WidthDim>),
}

/// The dimension of a tensor of all experts in which their width lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WidthDim {
    /// Which dimension.
    pub dim: usize,
    /// Neighbouring elements of it that belong together: 2 where gate and up alternate.
    pub each: usize,
}

/// Up to three matrices, or vectors, stored one behind the other: the rows of each, and how these are dealt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stack([(usize, Split); 3]);

impl Stack {
    /// The matrices in their order.
    #[must_use]
    pub fn new<const N: usize>(parts: [(usize, Split); N]) -> Self {
        const { assert!(N <= 3, "a stack of at most three matrices") };
        let mut all = [(0, Split::Even("rows")); 3];
        all[..N].copy_from_slice(&parts);
        Self(all)
    }

    /// Rows of all matrices.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.0.iter().map(|(rows, _)| rows).sum()
    }

    fn parts(&self) -> impl Iterator<Item = (usize, Split)> {
        self.0.into_iter().filter(|(rows, _)| *rows > 0)
    }
}

/// How a dimension is dealt to ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Parts that are equal to within one. The name is that of the dimension in the model's configuration.
    Even(&'static str),
    /// Whole query heads of this width.
    QueryHeads(HeadCounts, usize),
    /// Whole key-value heads of this width.
    KeyValueHeads(HeadCounts, usize),
    /// The width of an expert.
    ExpertWidth(ExpertIndex),
}

/// One expert of a layer that has several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertIndex {
    /// Which one.
    pub index: usize,
    /// Experts E of the layer.
    pub experts: usize,
}

/// Query heads H, and the key-value heads G that they share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadCounts {
    /// H.
    pub queries: usize,
    /// G, of which H is a multiple.
    pub key_values: usize,
}

/// The heads of a rank of a tensor-parallel group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub queries: Range<usize>,
    /// Key-value heads; shared with neighbours where there are fewer than ranks.
    pub key_values: Range<usize>,
}

/// More ranks than a model can be sharded over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// More ranks than a layer's heads or width can be dealt to.
    #[error("tensor parallel: {0}")]
    Tensor(String),
    /// More ranks than experts or their width can be dealt to.
    #[error("expert parallel: {0}")]
    Expert(String),
}

impl HeadCounts {
    /// The heads of rank `rank` of `ranks`: whole groups of query heads with their key-value head where there are enough of
    /// these, and else a part of such a group.
    ///
    /// # Errors
    /// More ranks than query heads can be dealt to.
    pub fn of_rank(self, (rank, ranks): (usize, usize)) -> Result<Heads, ShardError> {
        let Self { queries: heads, key_values: groups } = self;
        let each = heads / groups;
        if ranks <= groups {
            let key_values = part(groups, rank, ranks);
            return Ok(Heads { queries: key_values.start * each..key_values.end * each, key_values });
        }
        // The ranks of a key-value head are neighbours.
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
    /// The portions that a rank holds of a parameter of this shape: one, none of an expert of other ranks, several of matrices
    /// that are stored as one.
    ///
    /// # Errors
    /// More ranks than heads can be dealt to.
    pub fn portions(&self, name: &str, whole: &[usize], rank: ParallelRank) -> Result<Vec<Portion>, ShardError> {
        match self {
            // One rank alone has the parameter as it is stored.
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

    /// A rank's part of the dimension that is dealt, and who has the same.
    fn range(&self, size: usize, rank: ParallelRank) -> Result<Option<(Range<usize>, ReplicaGroup)>, ShardError> {
        let ParallelRank { tp, ep, moe_tp } = rank;
        // One rank alone holds what all hold.
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

    /// Refuses more ranks than a parameter of this shape can be dealt to.
    ///
    /// # Errors
    /// A dimension that is too small, with the numbers.
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

/// A rank's portion of a tensor of all experts.
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

/// The replica groups that a rank belongs to, in an order that is the same for all ranks, for parameters sharded like
/// these.
///
/// # Errors
/// More ranks than heads can be dealt to.
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
        // Which expert it is makes no difference: a rank is asked for one that it has.
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
    // Ranks may meet parameters in another order, but never groups of other kinds.
    all.sort();
    Ok(all)
}
