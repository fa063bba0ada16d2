//! Divides columns into panels.

use super::super::isa::TargetFeatures;
use std::ops::Range;

/// Columns in panels of at most as many vectors as the micro kernel takes, of sizes as equal as possible.
#[derive(Debug, Clone, Copy)]
pub(super) struct Panels {
    columns: usize,
    /// Number of elements in a vector.
    vector: usize,
    vectors: usize,
    count: usize,
}

impl Panels {
    pub(super) fn new(features: TargetFeatures, columns: usize) -> Self {
        let vectors = columns.div_ceil(features.vector());
        Self {
            columns,
            vector: features.vector(),
            vectors,
            count: (vectors * features.vector()).div_ceil(features.lanes()),
        }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The columns of a panel.
    pub(super) fn columns(&self, panel: usize) -> Range<usize> {
        self.start(panel)..self.start(panel + 1).min(self.columns)
    }

    /// Number of all columns.
    pub(super) fn all_columns(&self) -> usize {
        self.columns
    }

    /// Number of columns of some panels, including the padding of the last vector.
    pub(super) fn width(&self, panels: &Range<usize>) -> usize {
        self.start(panels.end) - self.start(panels.start)
    }

    /// Offset of a panel in a buffer of packed panels that begins with panel `first`, if their columns have `depth`
    /// elements.
    pub(super) fn at(&self, first: usize, panel: usize, depth: usize) -> usize {
        self.width(&(first..panel)) * depth
    }

    fn start(&self, panel: usize) -> usize {
        panel * self.vectors / self.count.max(1) * self.vector
    }
}

/// Part `index` of a range that is divided into `parts` parts, of sizes as equal as possible.
pub(super) fn part(range: &Range<usize>, index: usize, parts: usize) -> Range<usize> {
    let at = |index: usize| range.start + index * range.len() / parts;
    at(index)..at(index + 1)
}
