//! Division of the heads of a decoding call among tasks.

use super::super::HeadMap;
use std::ops::Range;

/// Number of tasks for each worker, so that all of them end at about the same time.
pub(super) const TASKS_PER_WORKER: usize = 4;

/// Key-value heads that one task reads, and the query heads that read them.
pub(in super::super) struct HeadRange {
    /// The key-value heads.
    pub(super) kv: Range<usize>,
    /// The query heads of each key-value head; consecutive.
    queries: Vec<Range<usize>>,
}

impl HeadRange {
    /// The query heads of all key-value heads.
    pub(super) fn heads(&self) -> Range<usize> {
        let (first, last) = (self.queries.first(), self.queries.last());
        first.map_or(0, |first| first.start)..last.map_or(0, |last| last.end)
    }

    /// The key-value heads that are read, and the numbers of their query heads in this range.
    pub(super) fn groups(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let first = self.heads().start;
        let groups = self.kv.clone().zip(&self.queries).filter(|(_, queries)| !queries.is_empty());
        groups.map(move |(kv, queries)| (kv, queries.start - first..queries.end - first))
    }
}

/// Divides the heads into ranges, where the keys are divided into `chunks`. It makes only as many ranges as keep all workers busy, since a
/// task that reads all heads reads contiguous memory. A head's results do not depend on its range.
pub(super) fn head_ranges(heads: &HeadMap, chunks: usize, workers: usize) -> Vec<HeadRange> {
    let wanted = if workers == 1 { 1 } else { (TASKS_PER_WORKER * workers).div_ceil(chunks.max(1)) };
    let ranges = wanted.min(heads.kv_heads());
    let each = heads.kv_heads().div_ceil(ranges.max(1)).max(1);
    let kv = (0..heads.kv_heads()).step_by(each).map(|first| first..heads.kv_heads().min(first + each));
    kv.map(|kv| HeadRange { queries: kv.clone().map(|kv| heads.queries_of(kv)).collect(), kv })
        .filter(|range| !range.heads().is_empty())
        .collect()
}
