//! The attention heads of each tensor-parallel rank.

use super::error::ShardError;
use crate::tensor_parallel::part;
use std::ops::Range;

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
