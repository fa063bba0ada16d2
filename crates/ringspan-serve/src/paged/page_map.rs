//! Maps the tokens of a sequence to their places in the cache: the rank of each page, and the rows of this rank's
//! pages.

use super::layer_kind::LayerPages;
use ringspan::Run;

/// The pages of a cache that is sharded over ranks, as one of them sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct PageMap {
    /// This rank.
    pub(super) rank: usize,
    /// Number of ranks P.
    pub(super) ranks: usize,
    /// Tokens in a page.
    pub(super) page_size: usize,
}

impl PageMap {
    /// The rank that has a position.
    pub(super) fn owner(&self, position: usize) -> usize {
        position / self.page_size % self.ranks
    }

    /// The row of a position in the cache of the rank that has it.
    pub(super) fn row(&self, table: &LayerPages, position: usize) -> u32 {
        table.page(position / self.page_size) * self.page_size as u32 + (position % self.page_size) as u32
    }

    /// The indices of this rank's pages in a table, of a sequence of `tokens` tokens.
    fn own(&self, table: &LayerPages, tokens: usize) -> impl Iterator<Item = usize> + use<> {
        let before = (self.rank + self.ranks - table.first % self.ranks) % self.ranks;
        (table.first + before..tokens.div_ceil(self.page_size)).step_by(self.ranks)
    }

    /// The runs of this rank's tokens among those of a document that a table has, up to `tokens`, in ascending order.
    pub(super) fn runs(&self, table: &LayerPages, document: usize, tokens: usize) -> Vec<Run> {
        if self.ranks == 1 {
            let start = table.first * self.page_size;
            return vec![Run { document, start, len: tokens - start, step: 1 }];
        }
        let run = |number: usize| {
            let start = number * self.page_size;
            Run { document, start, len: self.page_size.min(tokens - start), step: 1 }
        };
        self.own(table, tokens).map(run).collect()
    }

    /// Appends the cache rows of this rank's tokens, in the order of [`runs`](Self::runs).
    pub(super) fn push_rows(&self, table: &LayerPages, tokens: usize, rows: &mut Vec<u32>) {
        for number in self.own(table, tokens) {
            let (first, len) = (
                table.page(number) * self.page_size as u32,
                self.page_size.min(tokens - number * self.page_size) as u32,
            );
            rows.extend(first..first + len);
        }
    }
}
