//! What a plan is made of: transfers, computations, steps.

use crate::kernel::Tile;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;

/// What moves between ring ranks. The number is the ring rank that owns the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Block {
    /// Keys and values, as one message, in the wire type.
    Keys(usize),
    /// What some ranks have added to the gradients of keys and values, in f32.
    KeyGradients(usize),
    /// Queries, in the wire type; with the rows of a bias, both in f32.
    Queries(usize),
    /// Gradients of the output, maxima and sums of softmaxes, and deltas of queries, as one message, in f32.
    Saved(usize),
    /// What a rank's keys give to queries: a softmax state, in f32.
    Partial(usize),
    /// What a rank's keys give to the gradients of queries and of their rows of a bias, in f32.
    QueryGradients(usize),
}

impl Block {
    /// The ring rank whose tokens these are.
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

/// Rows of a ring rank's tokens: ranges that rise and do not touch.
///
/// All rows of a block are one range, which needs no memory of its own: plans of a large ring name millions of them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rows(Ranges);

/// Up to one range as it is, more of them shared between all who name them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Ranges {
    None,
    One(Range<usize>),
    Several(Arc<[Range<usize>]>),
}

impl Rows {
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

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ranges().is_empty()
    }

    /// The ranges, in order.
    pub fn ranges(&self) -> &[Range<usize>] {
        match &self.0 {
            Ranges::None => &[],
            Ranges::One(range) => std::slice::from_ref(range),
            Ranges::Several(ranges) => ranges,
        }
    }

    /// For each range the rows before it.
    fn before(&self) -> Vec<usize> {
        let count = |before: &mut usize, range: &Range<usize>| Some(std::mem::replace(before, *before + range.len()));
        self.ranges().iter().scan(0, count).collect()
    }

    /// Tells where rows that lie in one of the ranges stand when only these rows are kept.
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

/// A block on its way to or from a ring rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// What moves.
    pub block: Block,
    /// The other ring rank.
    pub peer: usize,
    /// Which of the owner's rows.
    pub rows: Rows,
}

/// Transfers of a step. Most steps have one of a kind, which lies in the step itself.
pub type Transfers = SmallVec<[Transfer; 1]>;

/// The tiles of a block of queries against a block of keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compute {
    /// The ring rank whose queries these are.
    pub queries: usize,
    /// The ring rank whose keys these are.
    pub keys: usize,
    /// What is visible; query rows are those of their owner, key rows count in the rows of the block at hand.
    pub tiles: Vec<Tile>,
    /// Which of the owner's key rows the block at hand holds.
    pub rows: Rows,
}

impl Compute {
    /// Visible pairs, for one head.
    pub fn pairs(&self) -> u64 {
        self.tiles.iter().map(|tile| tile.band.pairs(tile.q.len(), tile.k.len())).sum()
    }
}

/// One step: start `send` and `receive`, compute, wait for what was received, then send `after`.
///
/// Inputs are received at least a step before they are needed, results in the step that adds to them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Step {
    /// Sends started before the computation.
    pub send: Transfers,
    /// Receives started before the computation and waited for after it.
    pub receive: Transfers,
    /// What is computed.
    pub compute: Option<Compute>,
    /// Sends of what this step made.
    pub after: Transfers,
}

impl Step {
    pub(super) fn is_empty(&self) -> bool {
        self.send.is_empty() && self.receive.is_empty() && self.compute.is_none() && self.after.is_empty()
    }
}

/// The steps of one ring rank, in order.
pub type Plan = Vec<Step>;

/// Bytes of the lists of a plan, without those of its tiles.
pub(crate) fn list_bytes(plan: &Plan) -> u64 {
    let outside = |list: &Transfers| if list.spilled() { list.capacity() } else { 0 };
    let transfers = |step: &Step| [&step.send, &step.receive, &step.after].map(outside).iter().sum::<usize>();
    (size_of_val(&plan[..]) + plan.iter().map(transfers).sum::<usize>() * size_of::<Transfer>()) as u64
}

/// A pass through attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Outputs from inputs.
    Forward,
    /// Gradients of inputs from gradients of outputs.
    Backward,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_merge_and_count_in_what_is_kept() {
        let rows = Rows::union(vec![8..12, 2..4, 4..5, 7..7, 10..14]);
        assert_eq!(rows.ranges(), [2..5, 8..14]);
        assert_eq!((rows.len(), rows.compact()(&(3..5)), rows.compact()(&(9..14))), (9, 1..3, 4..9));
        assert!(Rows::all(0).is_empty() && Rows::union(vec![]) == Rows::all(0));
        assert_eq!(Rows::all(3), Rows::union(vec![1..3, 0..2]));
    }
}
