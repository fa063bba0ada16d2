//! The position of a rank in the groups that share layers and experts, and the groups of ranks that hold the same
//! partition.

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

/// The replica group of a parameter: ranks that hold the same partition of it. Its gradient is the sum over them.
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
    /// The replica group of an expert's parameter on `rank`, which is sharded in its width if `of_width`, and else
    /// whole.
    pub(super) fn of_experts(rank: ParallelRank, of_width: bool) -> Self {
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
