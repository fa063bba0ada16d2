//! Decides which sequences compute which tokens in the next step, and in which pages.
//!
//! Requests are admitted in the order in which they came. A step has one token of every sequence that is generating, and
//! prompts' next tokens up to a limit, so that a long prompt delays the others by a bounded time only ([`PrefillBudget`]). A request
//! waits while another reads the same beginning, and then finds it in the cache. Pages for all of a sequence's
//! tokens are reserved from its admission on, and it takes them as it computes; if a further page is missing, the youngest sequence is
//! put back into the queue and computed again later, from its tokens. A sequence that generates may also compute drafts, guesses of its
//! next tokens; they take pages only as long as there are some that nobody has reserved. In sliding-window layers, a sequence holds the
//! pages that its next tokens see, and those of the tokens that it computes next.

#[cfg(test)]
mod check;
mod page_allocation;
mod placement;
mod results;

use super::histogram::EngineHistograms;
use super::outbox::Outbox;
use super::prefill_budget::PrefillBudget;
use super::prefix_cache::PrefixCache;
use super::prefix_tree::AdapterSlot;
use super::prompt_lookup::propose;
use super::request::Event;
use super::sequence::{CopiedFrom, PageTable, Sequence};
use super::step::{CachePage, Outputs, PageCopy, Step, StepSequence, WindowPages};
use placement::Placement;
use std::collections::{BTreeSet, VecDeque};

/// Sizes that bound a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Tokens of a page.
    pub(super) page_size: usize,
    /// Largest number of sequences of a replica in a step.
    pub(super) max_running: usize,
    /// Largest number of prompts' tokens of a replica in a step.
    pub(super) prefill_chunk: usize,
    /// The same for a step in which other requests generate; `None` if it follows from what steps take.
    pub(super) mixed_chunk: Option<usize>,
    /// Largest number of drafts of a sequence in a step.
    pub(super) num_speculative_tokens: usize,
}

/// The requests of the engine, and the pages that they hold.
#[derive(Debug)]
pub(super) struct Scheduler {
    bounds: Bounds,
    prefill_budget: PrefillBudget,
    last_step: StepSize,
    /// The cache of each attention replica.
    caches: Vec<PrefixCache>,
    waiting: VecDeque<Sequence>,
    /// In the order of their arrival.
    running: Vec<Sequence>,
    counts: Counts,
    histograms: EngineHistograms,
    /// Tokens of prompts that the last step has read, and tokens that were drawn after it.
    step_tokens: usize,
    outbox: Outbox,
}

/// Counters since the start of the scheduler.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) prompt_tokens: u64,
    pub(super) generation_tokens: u64,
    pub(super) prefix_queries: u64,
    pub(super) prefix_hits: u64,
    pub(super) preemptions: u64,
    /// Steps of sequences with drafts, their drafts, and those that were drawn.
    pub(super) drafts: u64,
    pub(super) draft_tokens: u64,
    pub(super) accepted_tokens: u64,
}

/// Largest number of sequences at the head of the queue that are tried in a step, where some must wait for a particular replica.
const MOST_TRIED: usize = 8;

/// What the busiest replica computes in a step, as far as the step's time depends on that.
#[derive(Debug, Clone, Copy, Default)]
struct StepSize {
    /// Sequences that generate.
    generating: usize,
    /// Tokens of prompts.
    prompt_tokens: usize,
    /// Whether ranks share linear layers.
    shares_layers: bool,
}

/// A step, and the requests whose tokens it computes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ScheduledStep {
    pub(super) step: Step,
    /// For each sequence of the step, its arrival.
    pub(super) arrivals: Vec<u64>,
}

impl ScheduledStep {
    /// The sequences of the step, with their arrivals.
    pub(super) fn sequences(&self) -> impl Iterator<Item = (u64, &StepSequence)> {
        self.arrivals.iter().copied().zip(&self.step.sequences)
    }
}

impl Scheduler {
    pub(super) fn new(caches: Vec<PrefixCache>, bounds: Bounds) -> Self {
        let prefill_budget = PrefillBudget::new(bounds.prefill_chunk, bounds.mixed_chunk);
        Self {
            bounds,
            prefill_budget,
            last_step: StepSize::default(),
            caches,
            waiting: VecDeque::new(),
            running: Vec::new(),
            counts: Counts::default(),
            histograms: EngineHistograms::default(),
            step_tokens: 0,
            outbox: Outbox::default(),
        }
    }

    /// The cache of each attention replica.
    pub(super) fn caches(&self) -> &[PrefixCache] {
        &self.caches
    }

    pub(super) fn caches_mut(&mut self) -> &mut [PrefixCache] {
        &mut self.caches
    }

    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    pub(super) fn histograms(&self) -> &EngineHistograms {
        &self.histograms
    }

    /// The adapters of the sequences that run, and of those that wait.
    pub(super) fn adapters(&self) -> [BTreeSet<u64>; 2] {
        let slot = |sequence: &Sequence| sequence.namespace.adapter;
        [self.running.iter().filter_map(slot).collect(), self.waiting.iter().filter_map(slot).collect()]
    }

    /// Numbers of sequences that run and wait.
    pub(super) fn request_counts(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// Whether there is no request.
    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Whether a request computes, or will compute, with an adapter.
    pub(super) fn uses(&self, adapter: AdapterSlot) -> bool {
        self.running.iter().chain(&self.waiting).any(|sequence| sequence.namespace.adapter == adapter)
    }

    /// Queues a request.
    pub(super) fn add(&mut self, sequence: Sequence) {
        self.waiting.push_back(sequence);
    }

    /// A page that no sequence has, on the first rank of a replica, if there is one; it is given back with
    /// [`free_probe_page`](Self::free_probe_page).
    pub(super) fn allocate_probe_page(&mut self, replica: usize) -> Option<CachePage> {
        let cache = &mut self.caches[replica];
        let page = CachePage::from(cache.allocate(0)?);
        if cache.window().is_none() {
            return Some(page);
        }
        let window = cache.allocate_window(0);
        if window.is_none() {
            cache.release(0, page.full);
        }
        window.map(|window| CachePage { window: Some(window), ..page })
    }

    pub(super) fn free_probe_page(&mut self, replica: usize, page: CachePage) {
        let cache = &mut self.caches[replica];
        cache.release(0, page.full);
        page.window.into_iter().for_each(|page| cache.release_window(0, page));
    }

    /// Ends every request with a failure.
    pub(super) fn fail_all(&mut self, problem: &str) {
        for sequence in self.running.drain(..).chain(self.waiting.drain(..)) {
            sequence.tell(&mut self.outbox, Event::Failed(problem.to_owned()));
        }
        self.outbox.send();
    }

    /// Sends clients what has happened to their requests since the last call.
    pub(super) fn send_events(&mut self) {
        self.outbox.send();
    }

    /// Makes the next step; `None` if there is nothing to compute.
    pub(super) fn next(&mut self) -> Option<ScheduledStep> {
        self.end_abandoned();
        self.running.iter_mut().for_each(|sequence| sequence.drafts.clear());
        self.grow();
        let allowed = self.prefill_budget.tokens(self.generating());
        // The prompts' tokens that each replica may still compute in this step.
        let mut budgets = vec![allowed; self.caches.len()];
        // Tokens of a sequence for which it has pages.
        let (has_window, page_size) = (self.caches.iter().any(|cache| cache.window().is_some()), self.bounds.page_size);
        let with_pages = |PageTable { pages, window, .. }: &PageTable| match has_window {
            true => page_size * pages.len().min(window.end()),
            false => page_size * pages.len(),
        };
        let chunk_of = |sequence: &Sequence, budgets: &mut [usize]| match sequence.remaining() {
            1 => 1,
            remaining => {
                let budget = &mut budgets[sequence.replica];
                let chunk = remaining.min(*budget).min(with_pages(&sequence.page_table) - sequence.page_table.computed);
                *budget -= chunk;
                chunk
            }
        };
        let mut chunks: Vec<usize> = self.running.iter().map(|sequence| chunk_of(sequence, &mut budgets)).collect();
        let (mut at, mut closed) = (0, vec![false; self.caches.len()]);
        while at < self.waiting.len().min(MOST_TRIED) {
            for (replica, closed) in closed.iter_mut().enumerate() {
                *closed |= budgets[replica] == 0 || self.running_in(replica) >= self.bounds.max_running;
            }
            if closed.iter().all(|closed| *closed) {
                break;
            }
            let Some(mut sequence) = self.waiting.remove(at) else { break };
            match self.place(&sequence, &budgets, &closed) {
                Placement::In(replica, page_table) => {
                    self.count_found(&mut sequence, page_table.computed);
                    (sequence.replica, sequence.page_table) = (replica, page_table);
                    let place = self.running.partition_point(|other| other.arrival < sequence.arrival);
                    chunks.insert(place, chunk_of(&sequence, &mut budgets));
                    self.running.insert(place, sequence);
                }
                // Those that came later may not overtake it there.
                Placement::WaitsFor(replica) => {
                    closed[replica] = true;
                    self.waiting.insert(at, sequence);
                    at += 1;
                }
                Placement::Waits => {
                    self.waiting.insert(at, sequence);
                    break;
                }
            }
        }
        self.draft();
        // Replicas compute at the same time, so the time of a step depends on the one with most to do.
        let (mut generating, mut prompt_tokens) = (vec![0; self.caches.len()], vec![0; self.caches.len()]);
        for (sequence, chunk) in self.running.iter().zip(&chunks) {
            match chunk {
                1 => generating[sequence.replica] += 1,
                chunk => prompt_tokens[sequence.replica] += chunk,
            }
        }
        let [generating, prompt_tokens] = [generating, prompt_tokens].map(|all| all.into_iter().max().unwrap_or(0));
        // While a prompt waits, decode-only steps do not split linear layers over the ranks: the prefill budget compares their time with
        // that of mixed steps, which cannot split them.
        let waits =
            self.running.iter().any(|sequence| sequence.remaining() > 1) || allowed == 0 && !self.waiting.is_empty();
        let shares_layers = self.caches.iter().any(|cache| cache.pages().ranks() > 1) && !waits;
        self.last_step = StepSize { generating, prompt_tokens, shares_layers };
        let scheduled = self.scheduled(&chunks, shares_layers);
        (!scheduled.arrivals.is_empty()).then_some(scheduled)
    }

    /// Looks up drafts for the sequences that generate, and gives them pages if there are any that nobody has reserved.
    fn draft(&mut self) {
        let Bounds { page_size, num_speculative_tokens, .. } = self.bounds;
        if num_speculative_tokens == 0 {
            return;
        }
        let mut unreserved: Vec<Vec<usize>> = (0..self.caches.len()).map(|replica| self.unreserved(replica)).collect();
        for sequence in self.running.iter_mut().filter(|one| one.remaining() == 1 && one.generated() > 0) {
            let tokens = sequence.tokens.len();
            // Behind all drafts, one more token is drawn.
            let most = num_speculative_tokens.min(sequence.max_len.saturating_sub(tokens + 1));
            let mut drafts = propose(&sequence.tokens, most).to_vec();
            let (cache, unreserved) = (&mut self.caches[sequence.replica], &mut unreserved[sequence.replica]);
            let PageTable { pages, window, .. } = &mut sequence.page_table;
            while pages.len() * page_size < tokens + drafts.len() {
                let left = &mut unreserved[cache.rank_of(pages.len())];
                match (*left > 0).then(|| cache.allocate(pages.len())).flatten() {
                    Some(page) => {
                        pages.push(page);
                        *left -= 1;
                    }
                    None => drafts.truncate(pages.len() * page_size - tokens),
                }
            }
            while cache.window().is_some() && window.end() * page_size < tokens + drafts.len() {
                match cache.allocate_window(window.end()) {
                    Some(page) => window.pages.push(page),
                    None => drafts.truncate(window.end() * page_size - tokens),
                }
            }
            self.counts.drafts += u64::from(!drafts.is_empty());
            self.counts.draft_tokens += drafts.len() as u64;
            sequence.drafts = drafts;
        }
    }

    /// Ends sequences whose clients have left.
    fn end_abandoned(&mut self) {
        self.waiting.retain(|sequence| !sequence.is_abandoned());
        let mut index = 0;
        while index < self.running.len() {
            if self.running[index].is_abandoned() {
                self.end(index);
            } else {
                index += 1;
            }
        }
    }

    /// Counts the tokens of a prompt that were found in the cache when it is first admitted.
    fn count_found(&mut self, sequence: &mut Sequence, found: usize) {
        if sequence.cached_tokens.is_none() {
            sequence.cached_tokens = Some(found);
            sequence.times.start();
            sequence.tell(&mut self.outbox, Event::Started { cached_tokens: found });
            self.counts.prefix_hits += found as u64;
            self.counts.prefix_queries += if sequence.needs_whole_prompt() { 0 } else { sequence.prompt_len as u64 };
        }
    }

    /// Number of running sequences of a replica.
    fn running_in(&self, replica: usize) -> usize {
        self.running.iter().filter(|sequence| sequence.replica == replica).count()
    }

    /// Number of running sequences that generate in the replica with most of them.
    fn generating(&self) -> usize {
        let of_replica = |replica: usize| {
            self.running.iter().filter(|sequence| sequence.replica == replica && sequence.remaining() == 1).count()
        };
        (0..self.caches.len()).map(of_replica).max().unwrap_or(0)
    }

    /// The step in which each running sequence computes `chunks` tokens.
    fn scheduled(&self, chunks: &[usize], shares_layers: bool) -> ScheduledStep {
        let mut scheduled = ScheduledStep { step: Step { shares_layers, ..Step::default() }, ..Default::default() };
        let ScheduledStep { step: Step { copies, sequences, .. }, arrivals } = &mut scheduled;
        for (sequence, &chunk) in self.running.iter().zip(chunks).filter(|(_, chunk)| **chunk > 0) {
            let PageTable { computed: start, ref pages, ref window, copied_from, .. } = sequence.page_table;
            if let Some(CopiedFrom { index, page, window: from, rows }) = copied_from {
                let window = from.zip(window.get(index)).map(|(from, to)| [from, to]);
                let (replica, rank) = (sequence.replica, self.caches[sequence.replica].rank_of(index));
                copies.push(PageCopy { replica, rank, from: page, to: pages[index], window, rows });
            }
            let end = start + chunk;
            let drafts = sequence.drafts.as_slice();
            let reads_all = sequence.needs_whole_prompt() || !drafts.is_empty();
            let outputs = match (reads_all, end == sequence.tokens.len()) {
                (true, _) => Outputs::All,
                (false, true) => Outputs::Last,
                (false, false) => Outputs::None,
            };
            arrivals.push(sequence.arrival);
            let number = (end + drafts.len()).div_ceil(self.bounds.page_size);
            let in_window = window.pages.len().min(number.saturating_sub(window.first));
            sequences.push(StepSequence {
                start,
                tokens: [&sequence.tokens[start..end], drafts].concat(),
                pages: pages[..number].to_vec(),
                window: WindowPages { first: window.first, pages: window.pages[..in_window].to_vec() },
                outputs,
                adapter: sequence.namespace.adapter,
                replica: sequence.replica,
            });
        }
        scheduled
    }

    /// The index of a running sequence.
    pub(super) fn find(&self, arrival: u64) -> Option<usize> {
        self.running.binary_search_by_key(&arrival, |sequence| sequence.arrival).ok()
    }

    /// The running sequences.
    pub(super) fn running(&mut self) -> &mut [Sequence] {
        &mut self.running
    }
}
