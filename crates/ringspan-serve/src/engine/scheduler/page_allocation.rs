//! Gives sequences the pages that they need for the next step, reserves the others for them, and takes those of the youngest if
//! there are not enough.
//!
//! Only the number of the pages for a prompt's later chunks is reserved. Which pages they are is decided when they are computed, so that
//! the prefix cache keeps what it has until then.

use super::Scheduler;
use crate::engine::page_pool::PagePool;
use crate::engine::prefix_cache::{Hit, PrefixCache};
use crate::engine::prefix_tree::Namespace;
use crate::engine::sequence::{CopiedFrom, PageTable, Sequence};
use std::ops::Range;

impl Scheduler {
    /// Reserves pages for all tokens of every running sequence, and gives it those of the tokens that it may compute next; if there
    /// are not enough, the youngest sequences give theirs.
    pub(super) fn grow(&mut self) {
        for replica in 0..self.caches.len() {
            while !has_reserved(&self.caches[replica], &self.reserved(replica)) {
                self.preempt_youngest(replica);
            }
        }
        let chunk = self.prefill_budget.tokens(self.generating()).max(1);
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            let next = sequence.page_table.computed + sequence.remaining().min(chunk);
            let replica = sequence.replica;
            match extend(&mut self.caches[replica], &mut sequence.page_table, next) {
                true => index += 1,
                false => self.preempt_youngest(replica),
            }
        }
    }

    /// For each rank of a replica, the number of pages that its running sequences lack for all of their tokens.
    pub(super) fn reserved(&self, replica: usize) -> Vec<usize> {
        let running = || self.running.iter().filter(|sequence| sequence.replica == replica);
        let ranks = 0..self.caches[replica].pages().ranks();
        ranks.map(|rank| running().map(|sequence| self.lacking_on(sequence, rank)).sum()).collect()
    }

    /// Number of pages of a rank that a running sequence lacks for all of its tokens.
    fn lacking_on(&self, sequence: &Sequence, rank: usize) -> usize {
        let cache = &self.caches[sequence.replica];
        cache.pages_on(rank, sequence.page_table.pages.len()..sequence.tokens.len().div_ceil(cache.page_size()))
    }

    /// For each rank of a replica, the number of pages that are free or cached and that no running sequence has reserved.
    pub(super) fn unreserved(&self, replica: usize) -> Vec<usize> {
        let pages = self.caches[replica].pages();
        let left = |(rank, reserved)| pages.available(rank).saturating_sub(reserved);
        self.reserved(replica).into_iter().enumerate().map(left).collect()
    }

    fn preempt_youngest(&mut self, replica: usize) {
        let Some(youngest) = self.running.iter().rposition(|sequence| sequence.replica == replica) else { return };
        let mut sequence = self.running.remove(youngest);
        self.counts.preemptions += 1;
        self.release(&mut sequence);
        if sequence.needs_whole_prompt() {
            sequence.prompt_results.restart();
        }
        let at = self.waiting.partition_point(|other| other.arrival < sequence.arrival);
        self.waiting.insert(at, sequence);
    }

    /// The pages of a waiting sequence for the up to `chunk` tokens that it computes next in a replica where `others` run, those of the
    /// prefix cache first; `None` if there are not enough for all of its tokens.
    pub(super) fn allocate(
        &mut self,
        sequence: &Sequence,
        replica: usize,
        chunk: usize,
        others: usize,
    ) -> Option<PageTable> {
        let tokens = sequence.tokens.len();
        let reserved = self.reserved(replica);
        let mut page_table = PageTable::default();
        // The last token's hidden state is needed, so it is always computed.
        let known = &sequence.tokens[..tokens - 1];
        if !sequence.needs_whole_prompt() {
            page_table = prefix_pages(&mut self.caches[replica], &sequence.namespace, known);
        }
        let cache = &mut self.caches[replica];
        // While others run, a page of each rank is left to them, so that they do not have to be put back at once.
        let spare = usize::from(others > 0);
        let next = |page_table: &PageTable| tokens.min(page_table.computed.saturating_add(chunk));
        let fits = |cache: &PrefixCache, page_table: &PageTable| {
            has_room(cache, page_table, tokens, &reserved, spare)
                && has_room_in_window(cache, page_table, next(page_table), spare)
        };
        if page_table.copied_from.is_some()
            && !fits(cache, &page_table)
            && !take_copied_page(cache, &mut page_table, fits)
        {
            // Without the rows in that page, one page less is needed.
            let whole = page_table.pages.len() * cache.page_size();
            release_pages(cache, &mut page_table);
            page_table = prefix_pages(cache, &sequence.namespace, &known[..whole]);
        }
        let computes = next(&page_table);
        if fits(cache, &page_table) && extend(cache, &mut page_table, computes) {
            return Some(page_table);
        }
        release_pages(cache, &mut page_table);
        None
    }
}

/// The pages that the prefix cache has of the longest prefix of `known`; they are held for the sequence that continues it.
fn prefix_pages(cache: &mut PrefixCache, namespace: &Namespace, known: &[u32]) -> PageTable {
    let Hit { pages, node, partial, window, partial_window } = cache.hold_prefix(namespace, known);
    let (index, rows) = (pages.len(), partial.map_or(0, |(_, rows)| rows));
    PageTable {
        computed: index * cache.page_size() + rows,
        inserted: index,
        node,
        pages,
        window,
        copied_from: partial.map(|(page, rows)| CopiedFrom { index, page, window: partial_window, rows }),
    }
}

/// Takes a page out of the prefix cache for the sequence, instead of copying its rows to a new page, because there is no room for
/// both. Does so only if nothing else uses the page and the sequence then fits; returns whether it did. The prefix cache loses the
/// tokens after those rows.
fn take_copied_page(
    cache: &mut PrefixCache,
    page_table: &mut PageTable,
    fits: impl Fn(&PrefixCache, &PageTable) -> bool,
) -> bool {
    let Some(copied) = page_table.copied_from.take() else { return false };
    page_table.pages.push(copied.page);
    page_table.window.pages.extend(copied.window);
    if fits(cache, page_table) && cache.uncache(copied.index, copied.page) {
        return true;
    }
    page_table.pages.truncate(copied.index);
    page_table.window.pages.truncate(copied.index - page_table.window.first);
    page_table.copied_from = Some(copied);
    false
}

/// Whether the ranks have the pages that are reserved for running sequences.
pub(super) fn has_reserved(cache: &PrefixCache, reserved: &[usize]) -> bool {
    reserved.iter().enumerate().all(|(rank, reserved)| cache.pages().available(rank) >= *reserved)
}

/// Whether the ranks have the pages that a sequence lacks for `tokens` tokens, and `spare` more each, beside those that are `reserved`
/// for others.
fn has_room(cache: &PrefixCache, page_table: &PageTable, tokens: usize, reserved: &[usize], spare: usize) -> bool {
    let lacking = page_table.pages.len()..tokens.div_ceil(cache.page_size());
    // By holding the cached pages of its prefix, the sequence may have left too few for what others have reserved.
    has_reserved(cache, reserved) && has_pages(cache, cache.pages(), lacking, reserved, spare)
}

/// The same in sliding-window layers, if there are such layers.
fn has_room_in_window(cache: &PrefixCache, page_table: &PageTable, tokens: usize, spare: usize) -> bool {
    let Some(window) = cache.window() else { return true };
    let lacking = page_table.window.end()..tokens.div_ceil(cache.page_size());
    let nothing = vec![0; window.pages().ranks()];
    has_pages(cache, window.pages(), lacking, &nothing, spare)
}

/// Whether each rank that must give pages of the `lacking` ones has these, those that are `reserved`, and `spare` more.
fn has_pages(cache: &PrefixCache, pages: &PagePool, lacking: Range<usize>, reserved: &[usize], spare: usize) -> bool {
    reserved.iter().enumerate().all(|(rank, reserved)| match cache.pages_on(rank, lacking.clone()) {
        0 => true,
        needed => pages.available(rank) >= reserved + needed + spare,
    })
}

/// Gives a sequence the pages that it lacks for its first `tokens` tokens, as long as there are some; returns whether it has all.
fn extend(cache: &mut PrefixCache, page_table: &mut PageTable, tokens: usize) -> bool {
    let page_size = cache.page_size();
    while page_table.pages.len() * page_size < tokens {
        let Some(page) = cache.allocate(page_table.pages.len()) else { return false };
        page_table.pages.push(page);
    }
    while cache.window().is_some() && page_table.window.end() * page_size < tokens {
        let Some(page) = cache.allocate_window(page_table.window.end()) else { return false };
        page_table.window.pages.push(page);
    }
    true
}

/// Releases the pages of a sequence in the cache that has them.
pub(super) fn release_pages(cache: &mut PrefixCache, page_table: &mut PageTable) {
    let PageTable { pages, window, copied_from, .. } = std::mem::take(page_table);
    copied_from.into_iter().for_each(|from| release_copied(cache, from));
    for (index, page) in (window.first..).zip(window.pages) {
        cache.release_window(index, page);
    }
    for (index, page) in pages.into_iter().enumerate() {
        cache.release(index, page);
    }
}

/// Releases the page of which a sequence copies rows.
pub(super) fn release_copied(cache: &mut PrefixCache, from: CopiedFrom) {
    if let Some(page) = from.window {
        cache.release_window(from.index, page);
    }
    cache.release(from.index, from.page);
}
