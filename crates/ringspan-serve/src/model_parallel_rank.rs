//! The model-parallel rank: the position of a rank among the ranks that share a model (pipeline, tensor and expert parallel).

use ringspan_candle::ParallelRank;
use ringspan_candle::tensor_parallel::part;
use std::ops::Range;

/// Which part of a model a rank computes with: the layers of its pipeline stage, and its shard of each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ModelParallelRank {
    /// The pipeline stage, and the number of stages.
    pub(crate) stage: (usize, usize),
    /// The position in each group that shares layers.
    pub(crate) shard: ParallelRank,
}

impl Default for ModelParallelRank {
    /// A rank that computes the whole model.
    fn default() -> Self {
        Self { stage: (0, 1), shard: ParallelRank::default() }
    }
}

impl ModelParallelRank {
    /// Whether this rank computes the whole model.
    pub(crate) fn is_whole(&self) -> bool {
        *self == Self::default()
    }

    /// The layers of the stage, of `layers` in all: the stages have equally many, give or take one.
    pub(crate) fn layers(&self, layers: usize) -> Range<usize> {
        part(layers, self.stage.0, self.stage.1)
    }

    /// Whether the stage begins with the embedding.
    pub(crate) fn is_first(&self) -> bool {
        self.stage.0 == 0
    }

    /// Whether the stage ends with the last layer.
    pub(crate) fn is_last(&self) -> bool {
        self.stage.0 + 1 == self.stage.1
    }

    /// The rows of the output head, of `vocabulary` in all, that this rank holds: a share of its tensor-parallel rows, since all
    /// stages compute logits.
    pub(crate) fn vocabulary(&self, vocabulary: usize) -> Range<usize> {
        within(part(vocabulary, self.shard.tp.0, self.shard.tp.1), self.stage)
    }
}

/// The part of a range that belongs to one of several ranks.
pub(crate) fn within(range: Range<usize>, (rank, ranks): (usize, usize)) -> Range<usize> {
    let own = part(range.len(), rank, ranks);
    range.start + own.start..range.start + own.end
}
