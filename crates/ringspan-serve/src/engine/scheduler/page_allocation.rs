//! Gives sequences the pages that they need for the next step, and takes those of the youngest if there are not enough.

use super::Scheduler;
use crate::engine::pages::Pages;
use crate::engine::prefix_cache::{Hit, PrefixCache};
use crate::engine::prefix_tree::Namespace;
use crate::engine::sequence::{CopiedFrom, PageTable, Sequence};

impl Scheduler {
    /// Gives every running sequence pages for all of its tokens, and in sliding-window layers for those that it may compute next; if
    /// they do not suffice, the youngest sequences give theirs.
    pub(super) fn grow(&mut self) {
        let generating = self.running.iter().filter(|sequence| sequence.remaining() == 1).count();
        let chunk = self.prefill_budget.tokens(generating).max(1);
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            let next = sequence.page_table.computed + sequence.remaining().min(chunk);
            match extend(&mut self.cache, &mut sequence.page_table, sequence.tokens.len(), next) {
                true => index += 1,
                false => self.preempt_youngest(),
            }
        }
    }

    fn preempt_youngest(&mut self) {
        let Some(mut sequence) = self.running.pop() else { return };
        self.counts.preemptions += 1;
        self.release(&mut sequence);
        if sequence.needs_whole_prompt() {
            sequence.prompt_results.restart();
        }
        let at = self.waiting.partition_point(|other| other.arrival < sequence.arrival);
        self.waiting.insert(at, sequence);
    }

    /// The pages that the prefix cache has of the longest prefix of `known`; they are held for the sequence that continues it.
    fn prefix_pages(&mut self, namespace: &Namespace, known: &[u32]) -> PageTable {
        let Hit { pages, node, partial, window, partial_window } = self.cache.hold_prefix(namespace, known);
        let (index, rows) = (pages.len(), partial.map_or(0, |(_, rows)| rows));
        PageTable {
            computed: index * self.bounds.page + rows,
            inserted: index,
            node,
            pages,
            window,
            copied_from: partial.map(|(page, rows)| CopiedFrom { index, page, window: partial_window, rows }),
        }
    }

    /// The pages of a waiting sequence that computes up to `chunk` tokens next, those of the prefix cache first; `None` if there are not
    /// enough, or it should wait.
    pub(super) fn allocate(&mut self, sequence: &Sequence, chunk: usize) -> Option<PageTable> {
        let page = self.bounds.page;
        let tokens = sequence.tokens.len();
        let mut page_table = PageTable::default();
        // The last token's hidden state is needed, so it is always computed.
        let known = &sequence.tokens[..tokens - 1];
        if !sequence.needs_whole_prompt() {
            page_table = self.prefix_pages(&sequence.namespace, known);
            if self.is_being_read(sequence, page_table.computed) {
                self.release_pages(&mut page_table);
                return None;
            }
        }
        // While others run, a page of each rank is left to them, so that they do not have to be put back at once.
        let spare = usize::from(!self.running.is_empty());
        let next = |page_table: &PageTable| tokens.min(page_table.computed.saturating_add(chunk));
        let window_tokens = next(&page_table);
        if page_table.copied_from.is_some()
            && !self.has_room(&page_table, tokens, window_tokens, spare)
            && !self.take_copied_page(&mut page_table, tokens, window_tokens, spare)
        {
            // Without the rows in that page, one page less is needed.
            let whole = page_table.pages.len() * page;
            self.release_pages(&mut page_table);
            page_table = self.prefix_pages(&sequence.namespace, &known[..whole]);
        }
        let window_tokens = next(&page_table);
        if self.has_room(&page_table, tokens, window_tokens, spare)
            && extend(&mut self.cache, &mut page_table, tokens, window_tokens)
        {
            return Some(page_table);
        }
        self.release_pages(&mut page_table);
        None
    }

    /// Makes the cached page of which a sequence would copy rows its own, since there is no room for both, if nobody else needs it and
    /// there is room then; returns whether it did. The prefix cache loses what is after those rows.
    fn take_copied_page(
        &mut self,
        page_table: &mut PageTable,
        tokens: usize,
        window_tokens: usize,
        spare: usize,
    ) -> bool {
        let Some(copied) = page_table.copied_from.take() else { return false };
        page_table.pages.push(copied.page);
        page_table.window.pages.extend(copied.window);
        if self.has_room(page_table, tokens, window_tokens, spare) && self.cache.give_away(copied.index, copied.page) {
            return true;
        }
        page_table.pages.truncate(copied.index);
        page_table.window.pages.truncate(copied.index - page_table.window.first);
        page_table.copied_from = Some(copied);
        false
    }

    /// Whether the ranks have the pages that a sequence lacks for `tokens` tokens, and in sliding-window layers for `window_tokens`, and
    /// `spare` more each.
    fn has_room(&self, page_table: &PageTable, tokens: usize, window_tokens: usize, spare: usize) -> bool {
        let page = self.bounds.page;
        let have = |pages: &Pages, lacking: std::ops::Range<usize>| {
            let mut needed = vec![0; pages.ranks()];
            lacking.for_each(|index| needed[self.cache.rank_of(index)] += 1);
            needed.iter().enumerate().all(|(rank, needed)| *needed == 0 || pages.available(rank) >= needed + spare)
        };
        have(self.cache.pages(), page_table.pages.len()..tokens.div_ceil(page))
            && self
                .cache
                .window()
                .is_none_or(|window| have(window.pages(), page_table.window.end()..window_tokens.div_ceil(page)))
    }
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
