//! Checks in tests that sequences and page counts agree.

use super::Scheduler;
use crate::engine::pages::Pages;
use crate::engine::sequence::PageTable;
use std::collections::BTreeMap;

impl Scheduler {
    /// Panics if a page is held by a sequence that does not know of it, or the other way round.
    pub(in crate::engine) fn check(&self) {
        self.cache.check();
        if let Some(window) = self.cache.window() {
            self.check_window(window.pages());
        }
        let mut holders: BTreeMap<(usize, u32), u32> = BTreeMap::new();
        for sequence in &self.running {
            let PageTable { pages, copied_from, computed, inserted, .. } = &sequence.page_table;
            assert!(pages.len() * self.bounds.page >= *computed && *computed <= sequence.tokens.len());
            assert!(inserted * self.bounds.page <= *computed);
            let copied = copied_from.map(|from| (from.index, from.page));
            for (index, page) in pages.iter().copied().enumerate().chain(copied) {
                *holders.entry((self.cache.rank_of(index), page)).or_default() += 1;
            }
        }
        for rank in 0..self.cache.pages().ranks() {
            let used = holders.keys().filter(|(of, _)| *of == rank).count();
            assert_eq!(self.cache.pages().used(rank), used, "pages of rank {rank}");
        }
        for ((rank, page), count) in holders {
            assert_eq!(self.cache.pages().holders(rank, page), count, "page {page} of rank {rank}");
        }
        assert!(self.waiting.iter().all(|sequence| sequence.page_table.pages.is_empty()));
        assert!(self.running.is_sorted_by_key(|sequence| sequence.arrival));
    }

    /// Checks the page counts of sliding-window layers in the same way.
    fn check_window(&self, pages: &Pages) {
        let mut holders: BTreeMap<(usize, u32), u32> = BTreeMap::new();
        for sequence in &self.running {
            let PageTable { window, copied_from, computed, .. } = &sequence.page_table;
            assert!(
                window.end() * self.bounds.page >= *computed && window.first <= self.cache.first_in_window(*computed)
            );
            let copied = copied_from.and_then(|from| Some((from.index, from.window?)));
            for (index, page) in (window.first..).zip(window.pages.iter().copied()).chain(copied) {
                *holders.entry((self.cache.rank_of(index), page)).or_default() += 1;
            }
        }
        for rank in 0..pages.ranks() {
            let used = holders.keys().filter(|(of, _)| *of == rank).count();
            assert_eq!(pages.used(rank), used, "window pages of rank {rank}");
        }
        for ((rank, page), count) in holders {
            assert_eq!(pages.holders(rank, page), count, "window page {page} of rank {rank}");
        }
    }
}
