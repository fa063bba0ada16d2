//! Applies the results of a step: the cache has new rows, sequences have new tokens, and requests end.

use super::super::request::{Event, FinishReason};
use super::super::sequence::Sequence;
use super::super::token_sampler::Drawn;
use super::page_allocation::{release_copied, release_pages};
use super::{ScheduledStep, Scheduler, StepSize};
use std::time::Duration;

impl Scheduler {
    /// Records how long the last step took, from which the prefill budget of later steps follows. The time of a step that splits linear
    /// layers over the ranks does not count, since mixed steps cannot split them.
    pub(in crate::engine) fn record_step_time(&mut self, time: Duration) {
        self.histograms.step_tokens.observe(self.step_tokens as f64);
        let StepSize { generating, prompt_tokens, shares_layers } = self.last_step;
        match shares_layers {
            true => self.prefill_budget.record_untimed_step(generating),
            false => self.prefill_budget.record_step(generating, prompt_tokens, time),
        }
    }

    /// Records that a step has been computed: its keys and values are in the cache, and others may use them. Drafts count once they
    /// are drawn.
    pub(in crate::engine) fn commit_step(&mut self, step: &ScheduledStep) {
        self.step_tokens = 0;
        for (arrival, sequence) in step.sequences() {
            let Some(index) = self.find(arrival) else { continue };
            let Sequence { page_table, drafts, prompt_len, replica, .. } = &mut self.running[index];
            let copied = page_table.copied_from.take();
            let before = page_table.computed;
            page_table.computed += sequence.tokens.len() - drafts.len();
            self.step_tokens += page_table.computed.min(*prompt_len).saturating_sub(before);
            copied.into_iter().for_each(|from| release_copied(&mut self.caches[*replica], from));
            self.insert_full_pages(index);
        }
    }

    /// Adds the pages of a running sequence that have become full to the prefix cache, and releases those that have left its windows.
    fn insert_full_pages(&mut self, index: usize) {
        let page_size = self.bounds.page_size;
        let Sequence { page_table, tokens, namespace, replica, .. } = &mut self.running[index];
        let cache = &mut self.caches[*replica];
        while (page_table.inserted + 1) * page_size <= page_table.computed {
            let at = page_table.inserted;
            let of_page = &tokens[at * page_size..(at + 1) * page_size];
            let Some((node, kept)) = cache.insert(namespace, page_table.node, of_page, page_table.page(at)) else {
                break;
            };
            page_table.set_page(at, kept);
            (page_table.node, page_table.inserted) = (Some(node), at + 1);
        }
        let window = &mut page_table.window;
        let left = cache.first_in_window(page_table.computed).saturating_sub(window.first).min(window.pages.len());
        for page in window.pages.drain(..left) {
            cache.release_window(window.first, page);
            window.first += 1;
        }
    }

    /// Handles that the prompt of running sequence `index` has been read: reports what its client wants to know of it. Returns
    /// whether the request has ended by that.
    pub(in crate::engine) fn finish_prefill(&mut self, index: usize) -> bool {
        let sequence = &mut self.running[index];
        if sequence.generated() == 0 {
            self.counts.prompt_tokens += sequence.prompt_len as u64;
            for event in sequence.prompt_results.report(sequence.prompt_len) {
                sequence.tell(&mut self.outbox, event);
            }
            if sequence.max_len <= sequence.prompt_len {
                sequence.finish(&mut self.outbox, FinishReason::Length);
                self.end(index);
                return true;
            }
        }
        false
    }

    /// Handles the next token that was drawn for running sequence `index`; the client hears of it, and perhaps of the end. Returns
    /// whether the request has ended by that.
    pub(in crate::engine) fn append_token(&mut self, index: usize, drawn: Result<Drawn, String>) -> bool {
        let sequence = &mut self.running[index];
        let end = match drawn {
            Err(problem) => {
                sequence.tell(&mut self.outbox, Event::Failed(problem));
                true
            }
            Ok(drawn) if sequence.stop_token_ids.contains(&drawn.token) => {
                sequence.finish(&mut self.outbox, FinishReason::Stop { token: Some(drawn.token) });
                true
            }
            Ok(drawn) => {
                sequence.tokens.push(drawn.token);
                sequence.times.token();
                self.counts.generation_tokens += 1;
                self.step_tokens += 1;
                match sequence.drafts.first() == Some(&drawn.token) {
                    true => {
                        sequence.drafts.remove(0);
                        sequence.page_table.computed += 1;
                        self.counts.accepted_tokens += 1;
                    }
                    false => sequence.drafts.clear(),
                }
                sequence.tell(&mut self.outbox, Event::Token(drawn.token, drawn.logprobs));
                if drawn.ends {
                    sequence.finish(&mut self.outbox, FinishReason::Stop { token: None });
                } else if sequence.tokens.len() >= sequence.max_len {
                    sequence.finish(&mut self.outbox, FinishReason::Length);
                }
                drawn.ends || sequence.tokens.len() >= sequence.max_len
            }
        };
        self.insert_full_pages(index);
        if end {
            self.end(index);
        }
        end
    }

    /// Ends running sequence `index`: its pages go to the prefix cache, or are free.
    pub(super) fn end(&mut self, index: usize) {
        let mut sequence = self.running.remove(index);
        sequence.times.end(&mut self.histograms);
        self.release(&mut sequence);
    }

    /// Releases the pages of a sequence; a page that is not full goes to the prefix cache with the rows that are computed.
    pub(super) fn release(&mut self, sequence: &mut Sequence) {
        let page_size = self.bounds.page_size;
        let (cache, page_table) = (&mut self.caches[sequence.replica], &mut sequence.page_table);
        let full = page_table.computed / page_size;
        // Not all full pages may be in the tree: then what follows them cannot be, either.
        if page_table.inserted == full && page_table.computed > full * page_size {
            let rows = &sequence.tokens[full * page_size..page_table.computed];
            if let Some((_, kept)) = cache.insert(&sequence.namespace, page_table.node, rows, page_table.page(full)) {
                page_table.set_page(full, kept);
            }
        }
        release_pages(cache, page_table);
    }
}
