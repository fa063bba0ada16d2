//! The elements of a plan: steps, with their transfers and computations.

use crate::kernel::Tile;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;

/// A block that moves between ring ranks. The number is the ring rank that owns its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Block {
    /// Keys and values, as one message, in the wire type.
    Keys(usize),
    /// Partial sums of the gradients of keys and values, in f32, from the ranks that the block has visited.
    KeyGradients(usize),
    /// Queries, in the wire type; if there is a bias, queries and its rows as one message in f32.
    Queries(usize),
    /// The saved values that the backward pass needs of queries, as one message in f32: output gradients, softmax maxima
    /// and sums, deltas.
    Saved(usize),
    /// A softmax state in f32: the partial result of queries over one rank's keys.
    Partial(usize),
    /// Contribution of one rank's keys to the gradients of queries and of their bias rows, in f32.
    QueryGradients(usize),
}

impl Block {
    /// The ring rank that owns the tokens.
    pub fn owner(self) -> usize {
        match self {
            Self::Keys(owner)
            | Self::KeyGradients(owner)
            | Self::Queries(owner)
            | Self::Saved(owner)
            | Self::Partial(owner)
            | Self::QueryGradients(owner) => owner,
        }
    }
}

/// Rows of a ring rank's tokens, as ascending ranges that do not touch.
///
/// A single range needs no memory on the heap: plans of a large ring name millions of whole blocks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RowRanges(Ranges);

/// Up to one range is stored inline; several are shared between all clones.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Ranges {
    None,
    One(Range<usize>),
    Several(Arc<[Range<usize>]>),
}

impl RowRanges {
    /// The first `count` rows.
    pub fn all(count: usize) -> Self {
        Self(if count == 0 { Ranges::None } else { Ranges::One(0..count) })
    }

    /// The rows that lie in some of `ranges`.
    pub fn union(mut ranges: Vec<Range<usize>>) -> Self {
        ranges.retain(|range| !range.is_empty());
        ranges.sort_by_key(|range| range.start);
        let mut rows: Vec<Range<usize>> = Vec::new();
        for range in ranges {
            match rows.last_mut() {
                Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
                _ => rows.push(range),
            }
        }
        Self(match &rows[..] {
            [] => Ranges::None,
            [one] => Ranges::One(one.clone()),
            _ => Ranges::Several(rows.into()),
        })
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.ranges().iter().map(ExactSizeIterator::len).sum()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.ranges().is_empty()
    }

    /// The ranges, in ascending order.
    pub fn ranges(&self) -> &[Range<usize>] {
        match &self.0 {
            Ranges::None => &[],
            Ranges::One(range) => std::slice::from_ref(range),
            Ranges::Several(ranges) => ranges,
        }
    }

    /// For each range, the number of rows in the ranges before it.
    fn before(&self) -> Vec<usize> {
        let count = |before: &mut usize, range: &Range<usize>| Some(std::mem::replace(before, *before + range.len()));
        self.ranges().iter().scan(0, count).collect()
    }

    /// Returns a function that maps rows inside one of the ranges to their rows in a tensor that holds only these ranges.
    pub(super) fn compact(&self) -> impl Fn(&Range<usize>) -> Range<usize> {
        let before = self.before();
        move |rows| {
            let range = self.ranges().partition_point(|range| range.end <= rows.start);
            let start = self.ranges().get(range).map_or(0, |range| rows.start - range.start);
            let start = before.get(range).copied().unwrap_or(0) + start;
            start..start + rows.len()
        }
    }
}

/// The transfer of a block to or from another ring rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// The block that moves.
    pub block: Block,
    /// The ring rank at the other end.
    pub peer: usize,
    /// The rows of the owner's tokens that move.
    pub rows: RowRanges,
}

/// Transfers of a step. Most steps have one of each kind, which is stored inline.
pub type Transfers = SmallVec<[Transfer; 1]>;

/// The computation of a block of queries and a block of keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compute {
    /// The ring rank that owns the queries.
    pub queries: usize,
    /// The ring rank that owns the keys.
    pub keys: usize,
    /// Tiles of visible pairs. Query rows count in the owner's rows, key rows in the rows that the key block holds.
    pub tiles: Vec<Tile>,
    /// The owner's key rows that the key block holds.
    pub rows: RowRanges,
}

impl Compute {
    /// Number of visible pairs, for one head.
    pub fn pairs(&self) -> u64 {
        self.tiles.iter().map(|tile| tile.band.pairs(tile.q.len(), tile.k.len())).sum()
    }
}

/// One step: start `send` and `receive`, compute, wait for the receives, then send `after`.
///
/// Blocks to compute with are received at least a step before they are needed, partial results in the step that adds them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Step {
    /// Sends started before the computation.
    pub send: Transfers,
    /// Receives started before the computation and waited for after it.
    pub receive: Transfers,
    /// The computation of this step, if it has one.
    pub compute: Option<Compute>,
    /// Sends of the results of this step's computation, or of gradients that it has added to.
    pub after: Transfers,
}

impl Step {
    pub(super) fn is_empty(&self) -> bool {
        self.send.is_empty() && self.receive.is_empty() && self.compute.is_none() && self.after.is_empty()
    }
}

/// The steps of one ring rank, in order.
pub type Plan = Vec<Step>;

/// Bytes of the lists of a plan, without the lists of tiles.
pub(crate) fn list_bytes(plan: &Plan) -> u64 {
    let outside = |list: &Transfers| if list.spilled() { list.capacity() } else { 0 };
    let transfers = |step: &Step| [&step.send, &step.receive, &step.after].map(outside).iter().sum::<usize>();
    (size_of_val(&plan[..]) + plan.iter().map(transfers).sum::<usize>() * size_of::<Transfer>()) as u64
}

/// The forward or backward pass of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Computes outputs from inputs.
    Forward,
    /// Computes gradients of inputs from gradients of outputs.
    Backward,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_merge_and_are_renumbered_without_gaps() {
        let rows = RowRanges::union(vec![8..12, 2..4, 4..5, 7..7, 10..14]);
        assert_eq!(rows.ranges(), [2..5, 8..14]);
        assert_eq!((rows.len(), rows.compact()(&(3..5)), rows.compact()(&(9..14))), (9, 1..3, 4..9));
        assert!(RowRanges::all(0).is_empty() && RowRanges::union(vec![]) == RowRanges::all(0));
        assert_eq!(RowRanges::all(3), RowRanges::union(vec![1..3, 0..2]));
    }
}
