//! Checks in tests that sequences and page counts agree.

use super::Scheduler;
use crate::engine::pages::Pages;
use crate::engine::prefix_cache::PrefixCache;
use crate::engine::sequence::{PageTable, Sequence};
use std::collections::BTreeMap;

impl Scheduler {
    /// Panics if a page is held by a sequence that does not know of it, or the other way round.
    pub(in crate::engine) fn check(&self) {
        for (replica, cache) in self.caches.iter().enumerate() {
            cache.check();
            self.check_pages(replica, cache);
            if let Some(window) = cache.window() {
                self.check_window(replica, cache, window.pages());
            }
        }
        assert!(self.waiting.iter().all(|sequence| sequence.page_table.pages.is_empty()));
        assert!(self.running.is_sorted_by_key(|sequence| sequence.arrival));
    }

    fn sequences_in(&self, replica: usize) -> impl Iterator<Item = &Sequence> {
        self.running.iter().filter(move |sequence| sequence.replica == replica)
    }

    fn check_pages(&self, replica: usize, cache: &PrefixCache) {
        let mut holders: BTreeMap<(usize, u32), u32> = BTreeMap::new();
        for sequence in self.sequences_in(replica) {
            let PageTable { pages, copied_from, computed, inserted, .. } = &sequence.page_table;
            assert!(pages.len() * self.bounds.page >= *computed && *computed <= sequence.tokens.len());
            assert!(inserted * self.bounds.page <= *computed);
            let copied = copied_from.map(|from| (from.index, from.page));
            for (index, page) in pages.iter().copied().enumerate().chain(copied) {
                *holders.entry((cache.rank_of(index), page)).or_default() += 1;
            }
        }
        for rank in 0..cache.pages().ranks() {
            let used = holders.keys().filter(|(of, _)| *of == rank).count();
            assert_eq!(cache.pages().used(rank), used, "pages of rank {rank}");
        }
        for ((rank, page), count) in holders {
            assert_eq!(cache.pages().holders(rank, page), count, "page {page} of rank {rank}");
        }
    }

    /// Checks the page counts of sliding-window layers in the same way.
    fn check_window(&self, replica: usize, cache: &PrefixCache, pages: &Pages) {
        let mut holders: BTreeMap<(usize, u32), u32> = BTreeMap::new();
        for sequence in self.sequences_in(replica) {
            let PageTable { window, copied_from, computed, .. } = &sequence.page_table;
            assert!(window.end() * self.bounds.page >= *computed && window.first <= cache.first_in_window(*computed));
            let copied = copied_from.and_then(|from| Some((from.index, from.window?)));
            for (index, page) in (window.first..).zip(window.pages.iter().copied()).chain(copied) {
                *holders.entry((cache.rank_of(index), page)).or_default() += 1;
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
