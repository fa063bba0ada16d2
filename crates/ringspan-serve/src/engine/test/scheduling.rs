//! The scheduler over a simulated cache, whose rows are the tokens themselves: any row that is overwritten while somebody needs
//! it, or read before it is written, shows.

use super::super::pages::Pages;
use super::super::prefix_cache::{AdapterSlot, PrefixCache};
use super::super::request::{Event, Events, FinishReason, Request, TokenLogprobs};
use super::super::scheduler::{Bounds, Pass, Scheduler};
use super::super::sequence::Sequence;
use super::super::step::{Outputs, WindowPages};
use super::request;
use proptest::prelude::*;
use std::ops::Range;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::mpsc::unbounded_channel;

const VOCABULARY: u32 = 5;

/// The cache of all ranks.
struct Memory {
    page: usize,
    /// The largest number of tokens before its own that a token sees in layers with a window, and the rows of these layers.
    lookback: Option<usize>,
    window: Vec<Vec<Option<(u32, AdapterSlot)>>>,
    /// For each rank and row, the token and the adapter with which it was computed.
    rows: Vec<Vec<Option<(u32, AdapterSlot)>>>,
}

impl Memory {
    fn execute(&mut self, passes: &[Pass]) {
        for pass in passes {
            for copy in &pass.step.copies {
                for row in 0..copy.rows {
                    let from = self.rows[copy.rank][copy.from as usize * self.page + row];
                    assert!(from.is_some(), "{copy:?} reads a row that nobody wrote");
                    self.rows[copy.rank][copy.to as usize * self.page + row] = from;
                    if let Some([from, to]) = copy.window {
                        let from = self.window[copy.rank][from as usize * self.page + row];
                        assert!(from.is_some(), "{copy:?} reads a row of a window that nobody wrote");
                        self.window[copy.rank][to as usize * self.page + row] = from;
                    }
                }
            }
            for sequence in &pass.step.sequences {
                for (index, token) in sequence.tokens.iter().enumerate() {
                    let position = sequence.start + index;
                    let page = sequence.pages[position / self.page];
                    let rank = (position / self.page) % self.rows.len();
                    self.rows[rank][page as usize * self.page + position % self.page] = Some((*token, pass.adapter));
                    if self.lookback.is_some() {
                        let page = sequence.window.get(position / self.page).expect("a page of the window");
                        self.window[rank][page as usize * self.page + position % self.page] =
                            Some((*token, pass.adapter));
                    }
                }
            }
        }
    }

    /// The tokens of a text that is in these pages, all computed with this adapter.
    fn read(&self, pages: &[u32], len: usize, adapter: AdapterSlot) -> Vec<u32> {
        let row = |position: usize| {
            let page = pages[position / self.page] as usize;
            let row = self.rows[(position / self.page) % self.rows.len()][page * self.page + position % self.page];
            let (token, of) = row.expect("a row that was written");
            assert_eq!(of, adapter, "a row of another adapter");
            token
        };
        (0..len).map(row).collect()
    }

    /// The tokens that layers with a window find at these positions.
    fn read_window(&self, pages: &WindowPages, positions: Range<usize>, adapter: AdapterSlot) -> Vec<u32> {
        let row = |position: usize| {
            let page = pages.get(position / self.page).expect("a page of the window") as usize;
            let row = self.window[(position / self.page) % self.rows.len()][page * self.page + position % self.page];
            let (token, of) = row.expect("a row that was written");
            assert_eq!(of, adapter, "a row of another adapter");
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

struct Harness {
    scheduler: Scheduler,
    memory: Memory,
    clients: Vec<Client>,
    max_model_len: usize,
    bounds: Bounds,
}

struct Client {
    prompt: Vec<u32>,
    max_tokens: usize,
    adapter: AdapterSlot,
    /// Leaves after this many tokens.
    leaves: Option<usize>,
    events: Option<Events>,
    started: bool,
    heard: Vec<u32>,
    prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    end: Option<FinishReason>,
}

impl Harness {
    fn new(ranks: usize, pages: u32, bounds: Bounds, prefix_cache: bool) -> Self {
        Self::with_window(ranks, pages, bounds, prefix_cache, None)
    }

    /// With layers that see a window: the largest number of tokens before its own that a token sees there, and pages of these layers.
    fn with_window(ranks: usize, pages: u32, bounds: Bounds, prefix_cache: bool, window: Option<(usize, u32)>) -> Self {
        let mut cache = PrefixCache::new(Pages::new(ranks, pages), bounds.page, prefix_cache);
        if let Some((lookback, pages)) = window {
            cache = cache.with_window(Pages::new(ranks, pages), lookback);
        }
        let rows = |pages: u32| vec![vec![None; pages as usize * bounds.page]; ranks];
        let (lookback, window_pages) = window.unzip();
        Self {
            scheduler: Scheduler::new(cache, bounds),
            memory: Memory { page: bounds.page, lookback, window: rows(window_pages.unwrap_or(0)), rows: rows(pages) },
            clients: Vec::new(),
            max_model_len: ranks * pages as usize * bounds.page,
            bounds,
        }
    }

    fn submit(&mut self, request: Request, adapter: AdapterSlot, leaves: Option<usize>) {
        let (sender, events) = unbounded_channel();
        let (prompt, max_tokens) = (request.prompt.clone(), request.max_tokens);
        let arrival = self.clients.len() as u64;
        self.scheduler.add(Sequence::new(arrival, request, adapter, self.max_model_len, sender));
        self.clients.push(Client {
            prompt,
            max_tokens,
            adapter,
            leaves,
            events: Some(events),
            started: false,
            heard: Vec::new(),
            prompt_logprobs: None,
            end: None,
        });
    }

    /// One step; returns whether there was anything to compute.
    fn step(&mut self) -> bool {
        let running = self.scheduler.running().iter().filter(|sequence| sequence.remaining() == 1);
        let generating: Vec<u64> = running.map(|sequence| sequence.arrival).collect();
        let passes = self.scheduler.next();
        self.scheduler.check();
        let (running, _) = self.scheduler.sizes();
        assert!(running <= self.bounds.max_running);
        let mut prompts = 0;
        for (arrival, sequence) in passes.iter().flat_map(|pass| pass.arrivals.iter().zip(&pass.step.sequences)) {
            let index = self.scheduler.find(*arrival).expect("it runs");
            let drafts = self.scheduler.running()[index].drafts.len();
            assert!(
                drafts <= self.bounds.num_speculative_tokens && (drafts == 0 || sequence.tokens.len() == drafts + 1)
            );
            let chunk = sequence.tokens.len() - drafts;
            prompts += if chunk > 1 { chunk } else { 0 };
        }
        assert!(prompts <= self.bounds.prefill_chunk, "{prompts} tokens of prompts");
        if passes.iter().flat_map(|pass| &pass.arrivals).any(|arrival| generating.contains(arrival)) {
            assert!(
                self.bounds.mixed_chunk.is_none_or(|most| prompts <= most),
                "{prompts} tokens of prompts delay others"
            );
        }
        self.memory.execute(&passes);
        for pass in &passes {
            for (arrival, sequence) in pass.arrivals.iter().zip(&pass.step.sequences) {
                let index = self.scheduler.find(*arrival).expect("it runs");
                let end = sequence.start + sequence.tokens.len();
                let text = self.memory.read(&sequence.pages, end, pass.adapter);
                let one = &self.scheduler.running()[index];
                assert_eq!(text, [one.tokens.as_slice(), &one.drafts].concat()[..end], "sequence {arrival}");
                if let Some(lookback) = self.memory.lookback {
                    let first = sequence.start.saturating_sub(lookback);
                    let seen = self.memory.read_window(&sequence.window, first..end, pass.adapter);
                    assert_eq!(seen, text[first..], "the window of sequence {arrival}");
                }
            }
        }
        self.scheduler.computed(&passes);
        self.scheduler.check();
        for pass in &passes {
            for (arrival, sequence) in pass.arrivals.iter().zip(&pass.step.sequences) {
                let index = self.scheduler.find(*arrival).expect("it runs");
                let one = &mut self.scheduler.running()[index];
                let end = sequence.start + sequence.tokens.len();
                if sequence.outputs == Outputs::All {
                    for position in sequence.start..end.min(one.prompt - 1) {
                        let token = one.tokens[position + 1];
                        one.reading.add_logprobs(TokenLogprobs { token, logprob: position as f32, top: Vec::new() });
                    }
                }
                if one.remaining() > 0 || self.scheduler.prompt_read(index) {
                    continue;
                }
                // As long as a draft is drawn, one more token is.
                loop {
                    let one = &mut self.scheduler.running()[index];
                    let draft = one.drafts.first().copied();
                    let drawn = one.sampler.draw(&mut logits(&one.tokens, pass.adapter));
                    let accepted = matches!(&drawn, Ok(drawn) if draft == Some(drawn.token));
                    if self.scheduler.drawn(index, drawn) || !accepted {
                        break;
                    }
                }
                self.scheduler.check();
            }
        }
        self.scheduler.check();
        self.hear();
        !passes.is_empty()
    }

    fn hear(&mut self) {
        for client in &mut self.clients {
            loop {
                match client.events.as_mut().map(Events::try_recv) {
                    Some(Ok(Event::Token(token, _))) => client.heard.push(token),
                    Some(Ok(Event::Prompt(logprobs))) => {
                        assert!(client.prompt_logprobs.replace(logprobs).is_none(), "reported twice");
                    }
                    Some(Ok(Event::Started { .. })) => {
                        assert!(client.heard.is_empty() && !client.started, "started twice");
                        client.started = true;
                    }
                    Some(Ok(Event::Finished { reason })) => {
                        assert!(client.started);
                        client.end = Some(reason);
                    }
                    Some(Ok(other)) => panic!("{other:?}"),
                    Some(Err(TryRecvError::Empty | TryRecvError::Disconnected)) | None => break,
                }
                if client.leaves.is_some_and(|leaves| client.heard.len() >= leaves) {
                    client.events = None;
                }
            }
        }
    }

    /// Runs until nothing is left, and checks what every client heard.
    fn finish(mut self) -> Self {
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
                assert_eq!((client.heard.as_slice(), client.end), (expected, Some(FinishReason::Length)));
            } else {
                assert!(expected.starts_with(&client.heard));
            }
            if let Some(logprobs) = &client.prompt_logprobs {
                let tokens: Vec<u32> = logprobs.iter().flatten().map(|logprobs| logprobs.token).collect();
                assert_eq!(tokens, client.prompt[1..]);
                assert_eq!(logprobs.len(), client.prompt.len());
            }
        }
        let pages = self.scheduler.cache().pages();
        assert!((0..pages.ranks()).all(|rank| pages.used(rank) == 0), "pages are still in use");
        self
    }
}

fn bounds(page: usize) -> Bounds {
    Bounds { page, max_running: 4, prefill_chunk: 6, mixed_chunk: Some(3), num_speculative_tokens: 0 }
}

#[derive(Debug, Clone)]
struct Arrival {
    at: usize,
    shared: usize,
    own: Vec<u32>,
    max_tokens: usize,
    adapter: AdapterSlot,
    leaves: Option<usize>,
    logprobs: bool,
}

fn arrival() -> impl Strategy<Value = Arrival> {
    let adapter = prop_oneof![4 => Just(None), 1 => Just(Some(0)), 1 => Just(Some(1))];
    let leaves = prop_oneof![4 => Just(None), 1 => (0usize..9).prop_map(Some)];
    let own = proptest::collection::vec(0..VOCABULARY, 1..9);
    (0usize..60, 0usize..12, own, 0usize..12, adapter, leaves, proptest::bool::weighted(0.2)).prop_map(
        |(at, shared, own, max_tokens, adapter, leaves, logprobs)| Arrival {
            at,
            shared,
            own,
            max_tokens,
            adapter,
            leaves,
            logprobs,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Arrivals, lengths, departures and tiny caches as they come: after each step every page is accounted for, every row that is
    /// read was written for that text, and in the end everybody has the text of a lonely request, and no page is held.
    #[test]
    fn every_request_ends_with_its_own_text_however_many_there_are(
        arrivals in proptest::collection::vec(arrival(), 1..24),
        ranks in 1usize..5,
        page in 1usize..5,
        extra in 0u32..6,
        max_running in 1usize..6,
        prefill_chunk in 1usize..12,
        prefix_cache in any::<bool>(),
        num_speculative_tokens in 0usize..5,
        window in proptest::option::of((0usize..12, 0u32..6)),
    ) {
        // The longest of the sequences just fits.
        let longest = arrivals.iter().map(|one| one.shared + one.own.len() + one.max_tokens).max().expect("one");
        let pages = longest.div_ceil(page).div_ceil(ranks) as u32 + extra;
        let bounds = Bounds { page, max_running, prefill_chunk, mixed_chunk: Some(prefill_chunk.div_ceil(2)), num_speculative_tokens };
        // The window and a chunk of one sequence just fit.
        let window = window.map(|(lookback, extra)| {
            let one = ((lookback + prefill_chunk).div_ceil(page) + 1).div_ceil(ranks) as u32;
            (lookback, one.min(pages) + extra)
        });
        let mut harness = Harness::with_window(ranks, pages, bounds, prefix_cache, window);
        let beginning: Vec<u32> = (0..12).map(|i| i * i % VOCABULARY).collect();
        for at in 0..60 {
            for one in arrivals.iter().filter(|one| one.at == at) {
                let prompt = [&beginning[..one.shared], &one.own].concat();
                let request = Request { prompt_logprobs: one.logprobs.then_some(0), ..request(&prompt, one.max_tokens) };
                harness.submit(request, one.adapter, one.leaves);
            }
            harness.hear();
            harness.step();
        }
        let harness = harness.finish();
        let pages = harness.scheduler.cache().pages();
        prop_assert!(prefix_cache || (0..ranks).all(|rank| pages.cached(rank) == 0));
        if let Some(pages) = harness.scheduler.cache().window().map(|window| window.pages()) {
            prop_assert!((0..ranks).all(|rank| pages.used(rank) == 0 && (prefix_cache || pages.cached(rank) == 0)));
        }
        let logprobs = harness.clients.iter().zip(arrivals.iter().filter(|one| one.at < 60));
        prop_assert!(logprobs.count() == arrivals.len());
    }
}

#[test]
fn the_next_turn_of_a_chat_computes_only_what_is_new() {
    let mut harness = Harness::new(3, 20, bounds(4), true);
    harness.submit(request(&[1, 2, 3, 4, 0, 1], 9), None, None);
    let mut harness = harness.finish();
    let turn = [harness.clients[0].prompt.clone(), harness.clients[0].heard.clone(), vec![2, 2]].concat();
    harness.submit(request(&turn, 1), None, None);
    let passes = harness.scheduler.next();
    let [pass] = passes.as_slice() else { panic!("{passes:?}") };
    // The last generated token never passed through the model.
    assert_eq!((pass.step.sequences[0].start, pass.step.sequences[0].tokens.as_slice()), (14, &turn[14..]));
    assert_eq!(pass.step.copies.len(), 1, "the hit ends in the middle of a page");
    assert_eq!(pass.step.copies[0].rows, 2);
    let counts = harness.scheduler.counts();
    assert_eq!((counts.prefix_queries, counts.prefix_hits), (6 + 17, 14));
}

#[test]
fn a_long_prompt_delays_other_requests_by_a_chunk_at_most() {
    let mut harness = Harness::new(2, 60, bounds(4), true);
    harness.submit(request(&[1], 30), None, None);
    harness.step();
    harness.submit(request(&[2; 100], 1), None, None);
    for _ in 0..10 {
        let heard = harness.clients[0].heard.len();
        harness.step();
        assert_eq!(harness.clients[0].heard.len(), heard + 1);
    }
    assert!(harness.clients[1].heard.is_empty());
    harness.finish();
}

#[test]
fn the_youngest_gives_its_pages_when_they_run_out_and_goes_on_later() {
    let mut harness = Harness::new(2, 4, bounds(2), false);
    for first in 0..3 {
        harness.submit(request(&[first, 1, 2], 12), None, None);
    }
    let harness = harness.finish();
    assert!(harness.scheduler.counts().preemptions > 0, "the test needs a cache that is too small");
    assert_eq!(harness.scheduler.counts().generation_tokens, 36);
}

#[test]
fn a_client_that_leaves_frees_its_pages_at_the_next_step() {
    let mut harness = Harness::new(2, 16, bounds(2), false);
    harness.submit(request(&[0; 9], 20), None, Some(2));
    harness.submit(request(&[1; 3], 1000), None, None);
    while harness.clients[0].events.is_some() {
        harness.step();
    }
    let used = |harness: &Harness| (0..2).map(|rank| harness.scheduler.cache().pages().used(rank)).sum::<usize>();
    assert!(used(&harness) > 5);
    harness.step();
    let own = harness.scheduler.running()[0].tokens.len();
    assert!(used(&harness) <= own.div_ceil(2), "{} pages for {own} tokens", used(&harness));
    assert_eq!(harness.scheduler.sizes(), (1, 0));
    // What is generated is limited by the cache.
    harness.finish();
}

#[test]
fn requests_with_a_common_beginning_share_its_pages_while_they_run() {
    let mut harness = Harness::new(
        1,
        40,
        Bounds { page: 4, max_running: 8, prefill_chunk: 20, mixed_chunk: Some(20), num_speculative_tokens: 0 },
        true,
    );
    for last in 0..4 {
        let mut prompt = vec![3; 16];
        prompt.push(last);
        harness.submit(request(&prompt, 30), None, None);
        harness.step();
        harness.step();
    }
    // 4 common pages, and one to three of each request, of which the first has generated most.
    assert!(harness.scheduler.cache().pages().used(0) <= 4 + 3 + 2 + 2 + 1);
    assert_eq!(harness.scheduler.sizes().0, 4);
    harness.finish();
}

/// Several texts for one prompt are asked for at once: it is read once, save for its last page.
#[test]
fn a_prompt_that_is_asked_for_several_times_at_once_is_read_once() {
    let mut harness = Harness::new(
        2,
        40,
        Bounds { page: 4, max_running: 8, prefill_chunk: 9, mixed_chunk: Some(9), num_speculative_tokens: 0 },
        true,
    );
    let prompt: Vec<u32> = (0..30).map(|i| i * i % VOCABULARY).collect();
    for _ in 0..4 {
        harness.submit(request(&prompt, 5), None, None);
    }
    let harness = harness.finish();
    let counts = harness.scheduler.counts();
    assert_eq!(counts.prefix_hits, 3 * 28, "all full pages");
}

#[test]
fn drafts_that_are_drawn_save_steps_and_never_put_a_request_back() {
    let run = |num_speculative_tokens, pages| {
        let bounds = Bounds { num_speculative_tokens, ..bounds(4) };
        let mut harness = Harness::new(2, pages, bounds, true);
        harness.submit(request(&[1, 2, 3], 100), None, None);
        let mut steps = 0;
        while harness.step() {
            steps += 1;
        }
        let counts = harness.finish().scheduler.counts();
        assert_eq!((counts.preemptions, counts.generation_tokens), (0, 100));
        (steps, counts)
    };
    let (steps, counts) = run(0, 40);
    assert_eq!((steps, counts.drafts, counts.draft_tokens, counts.accepted_tokens), (100, 0, 0, 0));
    // The cache just holds the text.
    for pages in [40, 13] {
        let (steps, counts) = run(3, pages);
        assert!(counts.accepted_tokens > 0 && counts.accepted_tokens < counts.draft_tokens, "{counts:?}");
        assert_eq!(steps, 100 - counts.accepted_tokens);
    }
}

/// A sequence holds the pages of its window, however long its text is; those behind it stay in the prefix cache as long as there is
/// room, and a hit ends where they are.
#[test]
fn windows_hold_as_many_pages_behind_a_long_text_as_behind_a_short_one() {
    for ranks in 1..5 {
        let mut harness = Harness::with_window(ranks, 100, bounds(4), true, Some((19, 30)));
        harness.submit(request(&[2; 90], 200), None, None);
        let most = (20usize.div_ceil(4)).div_ceil(ranks) + 2;
        while harness.step() {
            let pages = harness.scheduler.cache().window().expect("windows").pages();
            assert!((0..ranks).all(|rank| pages.used(rank) <= most), "{ranks} ranks");
        }
        let mut harness = harness.finish();
        let text = [harness.clients[0].prompt.clone(), harness.clients[0].heard.clone()].concat();
        harness.submit(request(&text, 1), None, None);
        let passes = harness.scheduler.next();
        let sequence = &passes[0].step.sequences[0];
        assert_eq!(sequence.start, 289, "the end of the text is there");
        assert_eq!(sequence.window.first, (289 - 19) / 4);
    }
}

#[test]
fn a_hit_ends_where_the_pages_of_its_window_are_gone() {
    let mut harness = Harness::with_window(1, 200, bounds(4), true, Some((7, 5)));
    let text: Vec<u32> = (0..40).map(|i| i * i % VOCABULARY).collect();
    harness.submit(request(&text, 1), None, None);
    let mut harness = harness.finish();
    // The beginning has lost its window to what came behind it: nothing of it helps, except where the window begins the text.
    harness.submit(request(&text[..21], 1), None, None);
    let start = harness.scheduler.next()[0].step.sequences[0].start;
    assert_eq!(start, 0);
    harness.scheduler.fail_all("over");
    let mut harness = Harness::with_window(1, 200, bounds(4), true, Some((7, 80)));
    harness.submit(request(&text, 1), None, None);
    let mut harness = harness.finish();
    harness.submit(request(&text[..21], 1), None, None);
    assert_eq!(harness.scheduler.next()[0].step.sequences[0].start, 20);
}

/// A hit in the middle of a page needs that page and a copy. Where there is no room for both, the page itself is continued: without its
/// rows, the window before them would begin in a page that is gone, and nothing of the text would be a hit.
#[test]
fn a_hit_takes_its_last_page_where_there_is_no_room_for_a_copy() {
    let bounds = Bounds { prefill_chunk: 2, mixed_chunk: Some(2), ..bounds(4) };
    let text: Vec<u32> = (0..22).map(|i| i * i % VOCABULARY).collect();
    for window in [None, Some((5, 3))] {
        let mut harness = Harness::with_window(1, 7, bounds, true, window);
        harness.submit(request(&text, 1), None, None);
        let mut harness = harness.finish();
        // Another request holds the only page that is free, and that of the window before the last two pages.
        harness.submit(request(&[1, 1], 2), None, None);
        assert!(harness.step());
        harness.submit(request(&[text.as_slice(), &[3]].concat(), 1), None, None);
        assert!(harness.step());
        assert_eq!(harness.scheduler.counts().prefix_hits, 22, "{window:?}");
        harness.finish();
    }
}
