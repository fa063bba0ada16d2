//! Checks in tests that sequences and page counts agree.

use super::Scheduler;
use super::page_allocation::has_reserved;
use crate::engine::page_pool::PagePool;
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

    /// Panics if a sequence could lack a page of those that are reserved after a step has been scheduled.
    pub(in crate::engine) fn check_reserved(&self) {
        for (replica, cache) in self.caches.iter().enumerate() {
            let reserved = self.reserved(replica);
            assert!(has_reserved(cache, &reserved), "replica {replica} has fewer pages than {reserved:?}");
        }
    }

    fn sequences_in(&self, replica: usize) -> impl Iterator<Item = &Sequence> {
        self.running.iter().filter(move |sequence| sequence.replica == replica)
    }

    fn check_pages(&self, replica: usize, cache: &PrefixCache) {
        let mut holders: BTreeMap<(usize, u32), u32> = BTreeMap::new();
        for sequence in self.sequences_in(replica) {
            let PageTable { pages, copied_from, computed, inserted, .. } = &sequence.page_table;
            assert!(pages.len() * self.bounds.page_size >= *computed && *computed <= sequence.tokens.len());
            assert!(inserted * self.bounds.page_size <= *computed);
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
            assert_eq!(cache.pages().ref_count(rank, page), count, "page {page} of rank {rank}");
        }
    }

    /// Checks the page counts of sliding-window layers in the same way.
    fn check_window(&self, replica: usize, cache: &PrefixCache, pages: &PagePool) {
        let mut holders: BTreeMap<(usize, u32), u32> = BTreeMap::new();
        for sequence in self.sequences_in(replica) {
            let PageTable { window, copied_from, computed, .. } = &sequence.page_table;
            assert!(
                window.end() * self.bounds.page_size >= *computed && window.first <= cache.first_in_window(*computed)
            );
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
            assert_eq!(pages.ref_count(rank, page), count, "window page {page} of rank {rank}");
        }
    }
}
