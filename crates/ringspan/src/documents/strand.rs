//! A strand: runs of one document in the order of their positions.

use super::Run;
use std::collections::HashMap;
use std::ops::Range;

/// Runs of one document, in ascending order of positions and in consecutive rows of a rank.
///
/// Bisection finds the part of a strand that a query sees; runs that it sees completely form one range of rows.
#[derive(Debug, Clone)]
pub(crate) struct Strand {
    /// Row of the first token in the tensor of the rank that holds the strand.
    first_row: usize,
    runs: Vec<Run>,
    /// Number of tokens before each run, and of all runs as the last entry.
    tokens: Vec<usize>,
}

impl Strand {
    /// A strand of one run, whose first token is in `row`.
    fn new(row: usize, run: Run) -> Self {
        Self { first_row: row, runs: vec![run], tokens: vec![0, run.len] }
    }

    /// Groups the runs of a rank, given in local order, into strands by document. A document whose tokens are stored in the
    /// order of their positions is one strand.
    pub(crate) fn by_document(runs: &[Run]) -> HashMap<usize, Vec<Self>> {
        let mut strands: HashMap<usize, Vec<Self>> = HashMap::new();
        let (mut row, mut before) = (0, None);
        for run in runs.iter().filter(|run| run.len > 0) {
            let of_document = strands.entry(run.document).or_default();
            match of_document.last_mut() {
                Some(strand) if before == Some(run.document) && strand.is_before(run) => strand.push(*run),
                _ => of_document.push(Self::new(row, *run)),
            }
            row += run.len;
            before = Some(run.document);
        }
        strands
    }

    /// A strand of runs of one document that are sorted and do not overlap, starting at row 0; `None` if there are no runs.
    pub(crate) fn of_sorted(runs: impl IntoIterator<Item = Run>) -> Option<Self> {
        let mut runs = runs.into_iter();
        let mut strand = Self::new(0, runs.next()?);
        runs.for_each(|run| strand.push(run));
        Some(strand)
    }

    /// Whether `run` starts after the last token of this strand.
    fn is_before(&self, run: &Run) -> bool {
        self.runs.last().is_some_and(|last| last.last() < run.start)
    }

    fn push(&mut self, run: Run) {
        self.runs.push(run);
        self.tokens.push(self.len() + run.len);
    }

    /// The runs, in ascending order of positions.
    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.tokens.last().copied().unwrap_or(0)
    }

    /// The rows of the runs with indices `runs`.
    pub(crate) fn rows(&self, runs: &Range<usize>) -> Range<usize> {
        self.first_row + self.tokens[runs.start]..self.first_row + self.tokens[runs.end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_rise_without_another_document_between_are_one_strand() {
        let run = |document, start, len| Run { document, start, len, step: 1 };
        let runs = [run(0, 0, 3), run(0, 5, 2), run(1, 0, 4), run(0, 9, 1), run(0, 2, 1), run(1, 4, 2), run(1, 8, 1)];
        let strands = Strand::by_document(&runs);
        let rows = |document: usize| -> Vec<_> {
            strands[&document].iter().map(|strand| strand.rows(&(0..strand.runs().len()))).collect()
        };
        assert_eq!(rows(0), [0..5, 9..10, 10..11]);
        assert_eq!(rows(1), [5..9, 11..14]);
        assert_eq!((strands[&0][0].rows(&(1..2)), strands[&1][1].len()), (3..5, 3));
    }
}
