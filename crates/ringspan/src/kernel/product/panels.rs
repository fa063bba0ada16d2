//! How columns are cut into panels.

use super::super::isa::Code;
use std::ops::Range;

/// Columns as panels of as many vectors as the micro kernel takes at most, as even as they can be.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Panels {
    columns: usize,
    /// Numbers of a vector.
    vector: usize,
    vectors: usize,
    count: usize,
}

impl Panels {
    pub(super) fn new(code: Code, columns: usize) -> Self {
        let vectors = columns.div_ceil(code.vector());
        Self { columns, vector: code.vector(), vectors, count: (vectors * code.vector()).div_ceil(code.lanes()) }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Columns of a panel.
    pub(super) fn columns(&self, panel: usize) -> Range<usize> {
        self.start(panel)..self.start(panel + 1).min(self.columns)
    }

    /// Columns of some panels, the missing ones of the last vector among them.
    pub(super) fn width(&self, panels: &Range<usize>) -> usize {
        self.start(panels.end) - self.start(panels.start)
    }

    /// Where a panel starts among packed ones that begin with another, if their columns hold `depth` elements.
    pub(super) fn at(&self, first: usize, panel: usize, depth: usize) -> usize {
        self.width(&(first..panel)) * depth
    }

    fn start(&self, panel: usize) -> usize {
        panel * self.vectors / self.count.max(1) * self.vector
    }
}

/// One of so many parts of a range, as even as they can be.
pub(super) fn part(range: &Range<usize>, index: usize, parts: usize) -> Range<usize> {
    let at = |index: usize| range.start + index * range.len() / parts;
    at(index)..at(index + 1)
}
