//! Chooses the attention replica that computes a waiting sequence.

use super::Scheduler;
use crate::engine::prefix_cache::PrefixCache;
use crate::engine::sequence::{PageTable, Sequence};
use std::cmp::Reverse;

/// Where a waiting sequence is computed.
pub(super) enum Placement {
    /// In this replica, with these pages.
    In(usize, PageTable),
    /// It waits for this replica, which has its beginning or is reading it.
    WaitsFor(usize),
    /// No replica has room for it.
    Waits,
}

/// A replica is crowded if it has so many more sequences than the one with the fewest: a few more in a step cost little, as weights are
/// read once for all.
const CROWDED: usize = 8;

impl Scheduler {
    /// Chooses the attention replica that computes a waiting sequence, among those that are not `closed`, and allocates its pages
    /// there; `budgets` are the tokens of prompts that each may still compute in this step.
    ///
    /// 1. If a running sequence in an uncrowded replica is prefilling more of the same prefix than any of these has cached, the sequence
    ///    waits for it, unless it needs its whole prompt; with several replicas, only if that prefix is at least half of the sequence.
    /// 2. The uncrowded replica that has cached at least half of the sequence is preferred, and waited for if its budget is used up.
    /// 3. If the preferred replica has no room, replicas with fewer sequences are tried, the one with the fewest first; without a
    ///    preferred replica, all are, in this order. If none has room, the sequence waits.
    pub(super) fn place(&mut self, sequence: &Sequence, budgets: &[usize], closed: &[bool]) -> Placement {
        let known = &sequence.tokens[..sequence.tokens.len() - 1];
        let replicas = 0..self.caches.len();
        let running: Vec<usize> = replicas.clone().map(|replica| self.running_in(replica)).collect();
        let crowded = CROWDED + running.iter().min().copied().unwrap_or(0);
        let is_worth = |tokens: usize| tokens > 0 && 2 * tokens >= known.len();
        let mut cached = vec![0; self.caches.len()];
        if !sequence.needs_whole_prompt() {
            for (cached, cache) in cached.iter_mut().zip(&self.caches) {
                *cached = cache.prefix_len(&sequence.namespace, known);
            }
            let is_open = |replica: usize| running[replica] <= crowded;
            let at_hand = replicas.clone().filter(|at| is_open(*at)).map(|at| cached[at]).max();
            if let Some((reader, tokens)) = self.find_prefix_in_prefill(sequence, at_hand.unwrap_or(0), is_open)
                && (replicas.len() == 1 || is_worth(tokens))
            {
                return Placement::WaitsFor(reader);
            }
        }
        let preferred = replicas.clone().filter(|at| is_worth(cached[*at]) && running[*at] <= crowded);
        let preferred = preferred.max_by_key(|at| (cached[*at] / self.bounds.page_size, Reverse(running[*at])));
        if let Some(preferred) = preferred.filter(|preferred| budgets[*preferred] == 0) {
            return Placement::WaitsFor(preferred);
        }
        let is_candidate = |at: &usize| preferred.is_none_or(|other| *at == other || running[*at] < running[other]);
        let mut order: Vec<usize> = replicas.filter(is_candidate).collect();
        order.sort_by_cached_key(|at| {
            let unreserved: usize = self.unreserved(*at).into_iter().sum();
            (Some(*at) != preferred, running[*at], Reverse(unreserved))
        });
        for replica in order.into_iter().filter(|replica| !closed[*replica]) {
            if let Some(page_table) = self.allocate(sequence, replica, budgets[replica], running[replica]) {
                return Placement::In(replica, page_table);
            }
        }
        preferred.map_or(Placement::Waits, Placement::WaitsFor)
    }

    /// Finds a running sequence, in an open replica, that is prefilling more of this sequence's prefix than the `cached` tokens; waiting
    /// for it is cheaper than computing the same tokens again. Returns its replica, and the number of shared tokens in full pages.
    fn find_prefix_in_prefill(
        &self,
        sequence: &Sequence,
        cached: usize,
        is_open: impl Fn(usize) -> bool,
    ) -> Option<(usize, usize)> {
        let known = &sequence.tokens[..sequence.tokens.len() - 1];
        let is_reading = |other: &&Sequence| {
            other.namespace == sequence.namespace && other.remaining() > 1 && is_open(other.replica)
        };
        let readers =
            self.running.iter().filter(is_reading).filter(|_| self.caches.iter().all(PrefixCache::is_enabled));
        let in_common = readers.map(|other| {
            let common = known.iter().zip(&other.tokens).take_while(|(a, b)| a == b).count();
            let full_pages = common / self.bounds.page_size * self.bounds.page_size;
            let computed = other.page_table.computed;
            let is_ahead = full_pages > cached
                && full_pages > computed
                && computed >= cached / self.bounds.page_size * self.bounds.page_size;
            is_ahead.then_some((other.replica, full_pages))
        });
        in_common.flatten().max_by_key(|(_, tokens)| *tokens)
    }
}
