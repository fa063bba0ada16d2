//! Gives sequences the pages that they need for the next step, and takes those of the youngest if there are not enough.

use super::Scheduler;
use crate::engine::pages::Pages;
use crate::engine::prefix_cache::{Hit, PrefixCache};
use crate::engine::prefix_tree::Namespace;
use crate::engine::sequence::{CopiedFrom, PageTable, Sequence};
use crate::engine::window_pages::WindowPages;

impl Scheduler {
    /// Gives every running sequence pages for all of its tokens, and in sliding-window layers for those that it may compute next; if
    /// they do not suffice, the youngest sequences give theirs.
    pub(super) fn grow(&mut self) {
        let chunk = self.prefill_budget.tokens(self.generating()).max(1);
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            let next = sequence.page_table.computed + sequence.remaining().min(chunk);
            let replica = sequence.replica;
            match extend(&mut self.caches[replica], &mut sequence.page_table, sequence.tokens.len(), next) {
                true => index += 1,
                false => self.preempt_youngest(replica),
            }
        }
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

    /// The pages of a waiting sequence that computes up to `chunk` tokens next in a replica where `others` run, those of the prefix cache
    /// first; `None` if there are not enough.
    pub(super) fn allocate(
        &mut self,
        sequence: &Sequence,
        replica: usize,
        chunk: usize,
        others: usize,
    ) -> Option<PageTable> {
        let tokens = sequence.tokens.len();
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
        let window_tokens = next(&page_table);
        if page_table.copied_from.is_some()
            && !has_room(cache, &page_table, tokens, window_tokens, spare)
            && !take_copied_page(cache, &mut page_table, tokens, window_tokens, spare)
        {
            // Without the rows in that page, one page less is needed.
            let whole = page_table.pages.len() * cache.page();
            release_pages(cache, &mut page_table);
            page_table = prefix_pages(cache, &sequence.namespace, &known[..whole]);
        }
        let window_tokens = next(&page_table);
        if has_room(cache, &page_table, tokens, window_tokens, spare)
            && extend(cache, &mut page_table, tokens, window_tokens)
        {
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
        computed: index * cache.page() + rows,
        inserted: index,
        node,
        pages,
        window,
        copied_from: partial.map(|(page, rows)| CopiedFrom { index, page, window: partial_window, rows }),
    }
}

/// Makes the cached page of which a sequence would copy rows its own, since there is no room for both, if nobody else needs it and
/// there is room then; returns whether it did. The prefix cache loses what is after those rows.
fn take_copied_page(
    cache: &mut PrefixCache,
    page_table: &mut PageTable,
    tokens: usize,
    window_tokens: usize,
    spare: usize,
) -> bool {
    let Some(copied) = page_table.copied_from.take() else { return false };
    page_table.pages.push(copied.page);
    page_table.window.pages.extend(copied.window);
    if has_room(cache, page_table, tokens, window_tokens, spare) && cache.give_away(copied.index, copied.page) {
        return true;
    }
    page_table.pages.truncate(copied.index);
    page_table.window.pages.truncate(copied.index - page_table.window.first);
    page_table.copied_from = Some(copied);
    false
}

/// Whether the ranks have the pages that a sequence lacks for `tokens` tokens, and in sliding-window layers for `window_tokens`, and
/// `spare` more each.
fn has_room(cache: &PrefixCache, page_table: &PageTable, tokens: usize, window_tokens: usize, spare: usize) -> bool {
    let page = cache.page();
    let have = |pages: &Pages, lacking: std::ops::Range<usize>| {
        let mut needed = vec![0; pages.ranks()];
        lacking.for_each(|index| needed[cache.rank_of(index)] += 1);
        needed.iter().enumerate().all(|(rank, needed)| *needed == 0 || pages.available(rank) >= needed + spare)
    };
    let in_window = |window: &WindowPages| have(window.pages(), page_table.window.end()..window_tokens.div_ceil(page));
    have(cache.pages(), page_table.pages.len()..tokens.div_ceil(page)) && cache.window().is_none_or(in_window)
}

/// Gives a sequence the pages that it lacks for `tokens` tokens, and in sliding-window layers for `window_tokens`, as long as there
/// are some; returns whether it has all.
fn extend(cache: &mut PrefixCache, page_table: &mut PageTable, tokens: usize, window_tokens: usize) -> bool {
    let page = cache.page();
    while page_table.pages.len() * page < tokens {
        let Some(page) = cache.allocate(page_table.pages.len()) else { return false };
        page_table.pages.push(page);
    }
    while cache.window().is_some() && page_table.window.end() * page < window_tokens {
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
