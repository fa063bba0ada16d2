//! Where the tokens of a sequence are: the rank of each page, and the rows of this rank's pages.

use ringspan::Run;

/// The pages of a cache that is sharded over ranks, as one of them sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct PageMap {
    /// This rank.
    pub(super) rank: usize,
    /// Number of ranks P.
    pub(super) ranks: usize,
    /// Tokens in a page.
    pub(super) page: usize,
}

impl PageMap {
    /// The rank that has a position.
    pub(super) fn owner(&self, position: usize) -> usize {
        position / self.page % self.ranks
    }

    /// The row of a position in the cache of the rank that has it, where a page of the sequence is `pages[i]`.
    pub(super) fn row(&self, pages: &[u32], position: usize) -> u32 {
        pages[position / self.page] * self.page as u32 + (position % self.page) as u32
    }

    /// The runs of this rank's tokens among the first `tokens` of a document, in ascending order.
    pub(super) fn runs(&self, document: usize, tokens: usize) -> Vec<Run> {
        if self.ranks == 1 {
            return vec![Run { document, start: 0, len: tokens, step: 1 }];
        }
        let run = |number: usize| {
            let start = number * self.page;
            Run { document, start, len: self.page.min(tokens - start), step: 1 }
        };
        (self.rank..tokens.div_ceil(self.page)).step_by(self.ranks).map(run).collect()
    }

    /// Appends the cache rows of this rank's tokens among the first `tokens`, in the order of [`runs`](Self::runs).
    pub(super) fn push_rows(&self, pages: &[u32], tokens: usize, rows: &mut Vec<u32>) {
        for number in (self.rank..tokens.div_ceil(self.page)).step_by(self.ranks) {
            let (first, len) = (pages[number] * self.page as u32, self.page.min(tokens - number * self.page) as u32);
            rows.extend(first..first + len);
        }
    }
}
