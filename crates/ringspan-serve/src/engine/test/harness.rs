//! A simulated cache and clients for tests of the scheduler. The rows of the cache are the tokens themselves, so a row that is
//! overwritten while a sequence needs it, or read before it is written, makes a test fail.

use super::super::page_pool::PagePool;
use super::super::prefix_cache::PrefixCache;
use super::super::prefix_tree::AdapterSlot;
use super::super::request::{Event, Events, FinishReason, Request, TokenLogprobs};
use super::super::scheduler::{Bounds, Scheduler};
use super::super::sequence::Sequence;
use super::super::step::{Outputs, Step, StepSequence};
use std::ops::Range;
use std::time::Instant;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::mpsc::unbounded_channel;

pub(super) const VOCABULARY: u32 = 5;

/// The caches of all ranks, those of an attention replica after each other.
struct Memory {
    page: usize,
    /// Ranks of a replica.
    cp: usize,
    /// The largest number of tokens before its own that a token sees in layers with a window, and the rows of these layers.
    lookback: Option<usize>,
    window: Vec<Vec<Option<(u32, AdapterSlot)>>>,
    /// For each rank and row, the token and the adapter with which it was computed.
    rows: Vec<Vec<Option<(u32, AdapterSlot)>>>,
}

impl Memory {
    fn execute(&mut self, step: &Step) {
        for copy in &step.copies {
            assert!(copy.rank < self.cp);
            let rank = copy.replica * self.cp + copy.rank;
            for row in 0..copy.rows {
                let from = self.rows[rank][copy.from as usize * self.page + row];
                assert!(from.is_some(), "{copy:?} reads a row that nobody wrote");
                self.rows[rank][copy.to as usize * self.page + row] = from;
                if let Some([from, to]) = copy.window {
                    let from = self.window[rank][from as usize * self.page + row];
                    assert!(from.is_some(), "{copy:?} reads a row of a window that nobody wrote");
                    self.window[rank][to as usize * self.page + row] = from;
                }
            }
        }
        for sequence in &step.sequences {
            for (index, token) in sequence.tokens.iter().enumerate() {
                let position = sequence.start + index;
                let page = sequence.pages[position / self.page];
                let rank = self.rank_of(sequence.replica, position);
                let row = Some((*token, sequence.adapter));
                self.rows[rank][page as usize * self.page + position % self.page] = row;
                if self.lookback.is_some() {
                    let page = sequence.window.get(position / self.page).expect("a page of the window");
                    self.window[rank][page as usize * self.page + position % self.page] = row;
                }
            }
        }
    }

    /// The rank that has a position of a sequence of this replica.
    fn rank_of(&self, replica: usize, position: usize) -> usize {
        replica * self.cp + (position / self.page) % self.cp
    }

    /// The tokens of the text of a sequence up to `len`, all computed with its adapter.
    fn read(&self, sequence: &StepSequence, len: usize) -> Vec<u32> {
        let StepSequence { pages, adapter, replica, .. } = sequence;
        let row = |position: usize| {
            let page = pages[position / self.page] as usize;
            let row = self.rows[self.rank_of(*replica, position)][page * self.page + position % self.page];
            let (token, of) = row.expect("a row that was written");
            assert_eq!(of, *adapter, "a row of another adapter");
            token
        };
        (0..len).map(row).collect()
    }

    /// The tokens that layers with a window find at these positions of a sequence.
    fn read_window(&self, sequence: &StepSequence, positions: Range<usize>) -> Vec<u32> {
        let StepSequence { window: pages, adapter, replica, .. } = sequence;
        let row = |position: usize| {
            let page = pages.get(position / self.page).expect("a page of the window") as usize;
            let row = self.window[self.rank_of(*replica, position)][page * self.page + position % self.page];
            let (token, of) = row.expect("a row that was written");
            assert_eq!(of, *adapter, "a row of another adapter");
            token
        };
        positions.map(row).collect()
    }
}

/// The token that follows a text.
fn next(text: &[u32], adapter: AdapterSlot) -> u32 {
    let seed = adapter.map_or(7, |slot| slot + 11);
    let hash = text
        .iter()
        .fold(seed, |hash: u64, token| (hash ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3) ^ (hash >> 29));
    (hash >> 17) as u32 % VOCABULARY
}

fn logits(text: &[u32], adapter: AdapterSlot) -> Vec<f32> {
    let mut logits = vec![0.0; VOCABULARY as usize];
    logits[next(text, adapter) as usize] = 1.0;
    logits
}

/// A scheduler with a simulated cache and clients, which checks every step.
pub(super) struct Harness {
    pub(super) scheduler: Scheduler,
    memory: Memory,
    pub(super) clients: Vec<Client>,
    max_model_len: usize,
    bounds: Bounds,
    /// Tokens of prompts in the last step, and whether ranks share its layers.
    pub(super) last_step: (usize, bool),
}

pub(super) struct Client {
    pub(super) prompt: Vec<u32>,
    max_tokens: usize,
    adapter: AdapterSlot,
    /// Disconnects after this many tokens.
    leaves: Option<usize>,
    pub(super) events: Option<Events>,
    started: bool,
    pub(super) answer: Vec<u32>,
    prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    end: Option<FinishReason>,
}

impl Harness {
    pub(super) fn new(ranks: usize, pages: u32, bounds: Bounds, prefix_cache: bool) -> Self {
        Self::with_window(ranks, pages, bounds, prefix_cache, None)
    }

    /// With sliding-window layers: the largest number of tokens before its own that a token sees there, and pages of these layers.
    pub(super) fn with_window(
        ranks: usize,
        pages: u32,
        bounds: Bounds,
        prefix_cache: bool,
        window: Option<(usize, u32)>,
    ) -> Self {
        Self::with_replicas((1, ranks), pages, bounds, prefix_cache, window)
    }

    /// With a number of attention replicas, each of as many ranks.
    pub(super) fn with_replicas(
        (replicas, ranks): (usize, usize),
        pages: u32,
        bounds: Bounds,
        prefix_cache: bool,
        window: Option<(usize, u32)>,
    ) -> Self {
        let of_replica = |_| {
            let cache = PrefixCache::new(PagePool::new(ranks, pages), bounds.page_size, prefix_cache);
            match window {
                Some((lookback, pages)) => cache.with_window(PagePool::new(ranks, pages), lookback),
                None => cache,
            }
        };
        let caches = (0..replicas).map(of_replica).collect();
        let rows = |pages: u32| vec![vec![None; pages as usize * bounds.page_size]; replicas * ranks];
        let (lookback, window_pages) = window.unzip();
        Self {
            scheduler: Scheduler::new(caches, bounds),
            memory: Memory {
                page: bounds.page_size,
                cp: ranks,
                lookback,
                window: rows(window_pages.unwrap_or(0)),
                rows: rows(pages),
            },
            clients: Vec::new(),
            max_model_len: ranks * pages as usize * bounds.page_size,
            bounds,
            last_step: (0, false),
        }
    }

    pub(super) fn submit(&mut self, request: Request, adapter: AdapterSlot, leaves: Option<usize>) {
        let (sender, events) = unbounded_channel();
        let (prompt, max_tokens) = (request.prompt.clone(), request.max_tokens);
        let arrival = self.clients.len() as u64;
        self.scheduler.add(Sequence::new(arrival, request, adapter, self.max_model_len, Instant::now(), sender));
        self.clients.push(Client {
            prompt,
            max_tokens,
            adapter,
            leaves,
            events: Some(events),
            started: false,
            answer: Vec::new(),
            prompt_logprobs: None,
            end: None,
        });
    }

    /// One step; returns whether there was anything to compute.
    pub(super) fn step(&mut self) -> bool {
        let running = self.scheduler.running().iter().filter(|sequence| sequence.remaining() == 1);
        let generating: Vec<u64> = running.map(|sequence| sequence.arrival).collect();
        let Some(scheduled) = self.scheduler.next() else {
            self.scheduler.check();
            self.scheduler.check_reserved();
            self.collect();
            return false;
        };
        self.scheduler.check();
        self.scheduler.check_reserved();
        let replicas = self.scheduler.caches().len();
        let (mut running, mut prompts) = (vec![0; replicas], vec![0; replicas]);
        self.scheduler.running().iter().for_each(|sequence| running[sequence.replica] += 1);
        assert!(running.iter().all(|running| *running <= self.bounds.max_running));
        for (arrival, sequence) in scheduled.sequences() {
            let index = self.scheduler.find(arrival).expect("it runs");
            let drafts = self.scheduler.running()[index].drafts.len();
            assert!(
                drafts <= self.bounds.num_speculative_tokens && (drafts == 0 || sequence.tokens.len() == drafts + 1)
            );
            let chunk = sequence.tokens.len() - drafts;
            prompts[sequence.replica] += if chunk > 1 { chunk } else { 0 };
        }
        let prompts = prompts.into_iter().max().unwrap_or(0);
        assert!(prompts <= self.bounds.prefill_chunk, "{prompts} tokens of prompts");
        // One that was put back may be read again in another replica.
        let still_generates = |arrival: &u64| {
            let index = self.scheduler.find(*arrival).expect("it runs");
            generating.contains(arrival) && self.scheduler.running()[index].remaining() == 1
        };
        if scheduled.arrivals.iter().any(still_generates) {
            assert!(
                self.bounds.mixed_chunk.is_none_or(|most| prompts <= most),
                "{prompts} tokens of prompts delay others"
            );
        }
        let shares_layers = scheduled.step.shares_layers;
        assert!(!shares_layers || prompts == 0 && self.memory.cp > 1, "one rank, or a prompt, shares no layers");
        self.last_step = (prompts, shares_layers);
        self.memory.execute(&scheduled.step);
        for (arrival, sequence) in scheduled.sequences() {
            let index = self.scheduler.find(arrival).expect("it runs");
            let end = sequence.start + sequence.tokens.len();
            let text = self.memory.read(sequence, end);
            let one = &self.scheduler.running()[index];
            assert_eq!(text, [one.tokens.as_slice(), &one.drafts].concat()[..end], "sequence {arrival}");
            if let Some(lookback) = self.memory.lookback {
                let first = sequence.start.saturating_sub(lookback);
                let seen = self.memory.read_window(sequence, first..end);
                assert_eq!(seen, text[first..], "the window of sequence {arrival}");
            }
        }
        self.scheduler.commit_step(&scheduled);
        self.scheduler.check();
        for (arrival, sequence) in scheduled.sequences() {
            let index = self.scheduler.find(arrival).expect("it runs");
            let one = &mut self.scheduler.running()[index];
            let end = sequence.start + sequence.tokens.len();
            if sequence.outputs == Outputs::All {
                for position in sequence.start..end.min(one.prompt_len - 1) {
                    let token = one.tokens[position + 1];
                    one.prompt_results.add_logprobs(TokenLogprobs { token, logprob: position as f32, top: Vec::new() });
                }
            }
            if one.remaining() > 0 || self.scheduler.finish_prefill(index) {
                continue;
            }
            // As long as a draft is drawn, one more token is.
            loop {
                let one = &mut self.scheduler.running()[index];
                let draft = one.drafts.first().copied();
                let drawn = one.sampler.draw(&mut logits(&one.tokens, sequence.adapter));
                let accepted = matches!(&drawn, Ok(drawn) if draft == Some(drawn.token));
                if self.scheduler.append_token(index, drawn) || !accepted {
                    break;
                }
            }
            self.scheduler.check();
        }
        self.scheduler.check();
        self.collect();
        true
    }

    pub(super) fn collect(&mut self) {
        self.scheduler.send_events();
        for client in &mut self.clients {
            loop {
                match client.events.as_mut().map(Events::try_recv) {
                    Some(Ok(Event::Token(token, _))) => client.answer.push(token),
                    Some(Ok(Event::Prompt(logprobs))) => {
                        assert!(client.prompt_logprobs.replace(logprobs).is_none(), "reported twice");
                    }
                    Some(Ok(Event::Started { .. })) => {
                        assert!(client.answer.is_empty() && !client.started, "started twice");
                        client.started = true;
                    }
                    Some(Ok(Event::Finished { reason })) => {
                        assert!(client.started);
                        client.end = Some(reason);
                    }
                    Some(Ok(other)) => panic!("{other:?}"),
                    Some(Err(TryRecvError::Empty | TryRecvError::Disconnected)) | None => break,
                }
                if client.leaves.is_some_and(|leaves| client.answer.len() >= leaves) {
                    client.events = None;
                }
            }
        }
    }

    /// Runs until nothing is left, and checks the events of every client.
    pub(super) fn finish(mut self) -> Self {
        let mut steps = 0;
        while self.step() {
            steps += 1;
            assert!(steps < 20_000, "requests do not end");
        }
        assert!(self.scheduler.is_empty(), "requests wait although nothing runs");
        for client in &self.clients {
            let mut text = client.prompt.clone();
            let longest = (client.prompt.len() + client.max_tokens).min(self.max_model_len);
            while text.len() < longest {
                text.push(next(&text, client.adapter));
            }
            let expected = &text[client.prompt.len()..];
            if client.events.is_some() {
                assert_eq!((client.answer.as_slice(), client.end), (expected, Some(FinishReason::Length)));
            } else {
                assert!(expected.starts_with(&client.answer));
            }
            if let Some(logprobs) = &client.prompt_logprobs {
                let tokens: Vec<u32> = logprobs.iter().flatten().map(|logprobs| logprobs.token).collect();
                assert_eq!(tokens, client.prompt[1..]);
                assert_eq!(logprobs.len(), client.prompt.len());
            }
        }
        for cache in self.scheduler.caches() {
            let pages = cache.pages();
            assert!((0..pages.ranks()).all(|rank| pages.used(rank) == 0), "pages are still in use");
        }
        self
    }
}

pub(super) fn bounds(page_size: usize) -> Bounds {
    Bounds { page_size, max_running: 4, prefill_chunk: 6, mixed_chunk: Some(3), num_speculative_tokens: 0 }
}
