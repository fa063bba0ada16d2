//! Tests of the scheduler over a simulated cache.

use super::super::prefix_tree::AdapterSlot;
use super::super::request::Request;
use super::super::scheduler::Bounds;
use super::harness::{Harness, VOCABULARY, bounds};
use super::request;
use proptest::prelude::*;
use std::time::Duration;

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

    /// Random arrivals, lengths, disconnections and tiny caches: after each step every page is accounted for and every row that is
    /// read was written for that text; in the end each request has the text that it would get alone, and no page is held.
    #[test]
    fn every_request_ends_with_its_own_text_however_many_there_are(
        arrivals in proptest::collection::vec(arrival(), 1..24),
        (replicas, ranks) in (1usize..4, 1usize..5),
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
        let bounds = Bounds { page_size: page, max_running, prefill_chunk, mixed_chunk: Some(prefill_chunk.div_ceil(2)), num_speculative_tokens };
        // The window and a chunk of one sequence just fit.
        let window = window.map(|(lookback, extra)| {
            let one = ((lookback + prefill_chunk).div_ceil(page) + 1).div_ceil(ranks) as u32;
            (lookback, one.min(pages) + extra)
        });
        let mut harness = Harness::with_replicas((replicas, ranks), pages, bounds, prefix_cache, window);
        let beginning: Vec<u32> = (0..12).map(|i| i * i % VOCABULARY).collect();
        for at in 0..60 {
            for one in arrivals.iter().filter(|one| one.at == at) {
                let prompt = [&beginning[..one.shared], &one.own].concat();
                let request = Request { prompt_logprobs: one.logprobs.then_some(0), ..request(&prompt, one.max_tokens) };
                harness.submit(request, one.adapter, one.leaves);
            }
            harness.collect();
            harness.step();
        }
        let harness = harness.finish();
        for cache in harness.scheduler.caches() {
            let pages = cache.pages();
            prop_assert!(prefix_cache || (0..ranks).all(|rank| pages.cached(rank) == 0));
            if let Some(pages) = cache.window().map(|window| window.pages()) {
                prop_assert!((0..ranks).all(|rank| pages.used(rank) == 0 && (prefix_cache || pages.cached(rank) == 0)));
            }
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
    let turn = [harness.clients[0].prompt.clone(), harness.clients[0].answer.clone(), vec![2, 2]].concat();
    harness.submit(request(&turn, 1), None, None);
    let step = harness.scheduler.next().expect("a step").step;
    // The last generated token never passed through the model.
    assert_eq!((step.sequences[0].start, step.sequences[0].tokens.as_slice()), (14, &turn[14..]));
    assert_eq!(step.copies.len(), 1, "the hit ends in the middle of a page");
    assert_eq!(step.copies[0].rows, 2);
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
        let answer = harness.clients[0].answer.len();
        harness.step();
        assert_eq!(harness.clients[0].answer.len(), answer + 1);
    }
    assert!(harness.clients[1].answer.is_empty());
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

/// Numbers of pages of the only rank that sequences hold, and that only the prefix cache has.
fn used_and_cached(harness: &Harness) -> (usize, usize) {
    let pages = harness.scheduler.caches()[0].pages();
    (pages.used(0), pages.cached(0))
}

/// Pages that a prompt has only reserved are left to the prefix cache until the prompt is read that far.
#[test]
fn a_prompt_takes_its_pages_as_it_is_read() {
    let mut harness = Harness::new(1, 14, bounds(2), true);
    harness.submit(request(&[1; 12], 0), None, None);
    let mut harness = harness.finish();
    assert_eq!(used_and_cached(&harness), (0, 6));
    harness.submit(request(&[2; 24], 2), None, None);
    // 6 tokens of the prompt in each step.
    for used in [3, 6] {
        harness.step();
        assert_eq!(used_and_cached(&harness), (used, 6), "free pages are taken first");
    }
    harness.step();
    assert_eq!(used_and_cached(&harness), (9, 5));
    let harness = harness.finish();
    assert_eq!(harness.scheduler.counts().preemptions, 0);
}

/// The stream is older than the prompt, so it gets the page, and the prompt goes back to the queue before it lacks a page itself.
#[test]
fn a_stream_that_lacks_a_page_puts_back_the_prompt_that_has_reserved_it() {
    let mut harness = Harness::new(1, 12, bounds(2), false);
    harness.submit(request(&[4, 4], 14), None, None);
    harness.step();
    harness.submit(request(&[2; 17], 1), None, None);
    // The stream has two pages, and the prompt needs nine.
    while harness.clients[0].answer.len() < 5 {
        harness.step();
        assert_eq!(harness.scheduler.request_counts(), (2, 0));
    }
    assert!(used_and_cached(&harness).0 < 12, "no page is missing yet");
    harness.step();
    assert_eq!(harness.scheduler.request_counts(), (1, 1));
    let harness = harness.finish();
    assert_eq!(harness.scheduler.counts().preemptions, 1);
}

#[test]
fn a_client_that_leaves_frees_its_pages_at_the_next_step() {
    let mut harness = Harness::new(2, 16, bounds(2), false);
    harness.submit(request(&[0; 9], 20), None, Some(2));
    harness.submit(request(&[1; 3], 1000), None, None);
    while harness.clients[0].events.is_some() {
        harness.step();
    }
    let used = |harness: &Harness| (0..2).map(|rank| harness.scheduler.caches()[0].pages().used(rank)).sum::<usize>();
    assert!(used(&harness) > 5);
    harness.step();
    let own = harness.scheduler.running()[0].tokens.len();
    assert!(used(&harness) <= own.div_ceil(2), "{} pages for {own} tokens", used(&harness));
    assert_eq!(harness.scheduler.request_counts(), (1, 0));
    // The cache limits the number of generated tokens.
    harness.finish();
}

#[test]
fn requests_with_a_common_beginning_share_its_pages_while_they_run() {
    let mut harness = Harness::new(
        1,
        40,
        Bounds { page_size: 4, max_running: 8, prefill_chunk: 20, mixed_chunk: Some(20), num_speculative_tokens: 0 },
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
    assert!(harness.scheduler.caches()[0].pages().used(0) <= 4 + 3 + 2 + 2 + 1);
    assert_eq!(harness.scheduler.request_counts().0, 4);
    harness.finish();
}

/// Several texts for one prompt are asked for at once: it is read once, save for its last page.
#[test]
fn a_prompt_that_is_asked_for_several_times_at_once_is_read_once() {
    let mut harness = Harness::new(
        2,
        40,
        Bounds { page_size: 4, max_running: 8, prefill_chunk: 9, mixed_chunk: Some(9), num_speculative_tokens: 0 },
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

/// Where ranks share layers, steps that only generate take a quarter of the time; a prompt is read in chunks as large as if they did
/// not, since steps with a prompt cannot share.
#[test]
fn a_prompt_is_not_read_slower_where_ranks_share_layers() {
    let bounds =
        Bounds { page_size: 16, max_running: 4, prefill_chunk: 512, mixed_chunk: None, num_speculative_tokens: 0 };
    let mut harness = Harness::new(4, 100, bounds, true);
    let step = |harness: &mut Harness| {
        assert!(harness.step());
        let (tokens, shares_layers) = harness.last_step;
        let seconds = if shares_layers { 0.005 } else { 0.02 } + 1e-4 * tokens as f64;
        harness.scheduler.record_step_time(Duration::from_secs_f64(seconds));
        (tokens, shares_layers)
    };
    harness.submit(request(&[1, 2, 3], 300), None, None);
    assert_eq!(step(&mut harness), (3, false));
    assert!((0..20).all(|_| step(&mut harness) == (0, true)), "nothing waits");
    let prompt: Vec<u32> = (0..4000).map(|i| i * i % VOCABULARY).collect();
    harness.submit(request(&prompt, 100), None, None);
    let (mut chunks, mut read) = (Vec::new(), 0);
    while read < prompt.len() {
        let (tokens, shares_layers) = step(&mut harness);
        assert!(!shares_layers, "the prompt waits");
        chunks.push(tokens);
        read += tokens;
        assert!(chunks.len() < 100, "the prompt is not read");
    }
    // The time without a prompt is measured first: 20 ms. A token of the first request's prompt took 6.8 ms, so 36 ms are enough for 5.
    assert_eq!(chunks[..2], [0, 5]);
    // Then the time of a token is measured, and a step that takes 2.8 times as long has 360 of them.
    assert!(chunks[2..chunks.len() - 1].iter().all(|tokens| tokens.abs_diff(360) < 4), "{chunks:?}");
    assert!((0..20).all(|_| step(&mut harness) == (0, true)), "the prompt is read");
    harness.finish();
}

fn wide_bounds() -> Bounds {
    Bounds { page_size: 16, max_running: 64, prefill_chunk: 4096, mixed_chunk: Some(4096), num_speculative_tokens: 0 }
}

/// The replicas of the sequences that run after a step.
fn replicas_after_step(harness: &mut Harness) -> Vec<usize> {
    harness.step();
    harness.scheduler.running().iter().map(|sequence| sequence.replica).collect()
}

/// Requests go to the replica with the fewest, unless another has at least half of the prompt in its cache.
#[test]
fn replicas_share_requests_and_continue_what_they_have() {
    let mut harness = Harness::with_replicas((3, 2), 100, wide_bounds(), true, None);
    for first in 0..4 {
        harness.submit(request(&[first; 40], 50), None, None);
    }
    assert_eq!(replicas_after_step(&mut harness), [0, 1, 2, 0]);
    let long: Vec<u32> = (0..600).map(|i| (i * i + i / 7) % VOCABULARY).collect();
    harness.submit(request(&long, 1), None, None);
    assert_eq!(replicas_after_step(&mut harness), [0, 1, 2, 0], "it has ended, and a replica has its pages");
    let hits = harness.scheduler.counts().prefix_hits;
    harness.submit(request(&[&long[..], &[1, 2]].concat(), 50), None, None);
    let joined = replicas_after_step(&mut harness)[4];
    assert_eq!(harness.scheduler.counts().prefix_hits - hits, 600);
    // Less than half of the next one is there.
    harness.submit(request(&[&long[..200], &[4; 300]].concat(), 50), None, None);
    assert_eq!(replicas_after_step(&mut harness)[5], 3 - joined);
    harness.finish();
}

/// Requests with the same prompt wait until one has read it, and join it; where too many do, another replica reads it as well.
#[test]
fn a_burst_of_equal_prompts_is_read_once_until_a_replica_is_crowded() {
    let mut harness = Harness::with_replicas((3, 1), 400, wide_bounds(), true, None);
    for _ in 0..40 {
        harness.submit(request(&[3; 200], 30), None, None);
    }
    assert_eq!(replicas_after_step(&mut harness), [0], "the others wait for what it reads");
    let mut running = vec![0; 3];
    for _ in 0..8 {
        running = vec![0; 3];
        replicas_after_step(&mut harness).into_iter().for_each(|replica| running[replica] += 1);
    }
    assert_eq!(running.iter().sum::<usize>(), 40);
    assert!(running.iter().all(|running| (8..=20).contains(running)), "{running:?}");
    assert!(harness.scheduler.counts().prefix_hits >= 37 * 192, "{:?}", harness.scheduler.counts());
    harness.finish();
}

/// Each replica reads prompts of its own in a step, and a request does not wait for the prompt that another replica reads.
#[test]
fn replicas_read_prompts_at_the_same_time() {
    let bounds =
        Bounds { page_size: 4, max_running: 8, prefill_chunk: 16, mixed_chunk: None, num_speculative_tokens: 0 };
    let mut harness = Harness::with_replicas((2, 1), 100, bounds, true, None);
    for (first, length) in [(0, 64), (1, 64), (2, 10)] {
        harness.submit(request(&[first; 64][..length], 1), None, None);
    }
    assert_eq!(replicas_after_step(&mut harness), [0, 1], "the third waits for budget, and the others read");
    let computed: Vec<usize> = harness.scheduler.running().iter().map(|one| one.page_table.computed).collect();
    assert_eq!(computed, [16, 16]);
    harness.finish();
}

/// A continuation goes to the replica that has its beginning; if that has no place, to one with fewer sequences as soon as there is one.
#[test]
fn a_request_does_not_wait_for_a_full_replica_while_another_has_fewer() {
    let bounds =
        Bounds { page_size: 4, max_running: 1, prefill_chunk: 64, mixed_chunk: Some(64), num_speculative_tokens: 0 };
    for long in [20, 3] {
        let mut harness = Harness::with_replicas((2, 1), 100, bounds, true, None);
        harness.submit(request(&[0; 40], 1), None, None);
        harness.step();
        harness.submit(request(&[1; 8], long), None, None);
        harness.submit(request(&[2; 8], 8), None, None);
        assert_eq!(replicas_after_step(&mut harness), [0, 1], "the first has the beginning that comes next");
        harness.submit(request(&[&[0; 40][..], &[3; 9]].concat(), 9), None, None);
        harness.submit(request(&[4; 8], 2), None, None);
        while harness.clients[3].answer.is_empty() {
            assert!(harness.step());
        }
        let ended = [1, 2].map(|client| harness.clients[client].answer.len() == [long, 8][client - 1]);
        assert_eq!(ended, [long == 3, long == 20], "it takes the first place that is free");
        assert_eq!(harness.scheduler.counts().prefix_hits, if long == 3 { 40 } else { 0 });
        harness.finish();
    }
}

/// A sequence that lacks a page takes those of the youngest in its own replica; those of others would not help it.
#[test]
fn a_full_replica_puts_back_its_own_sequences_only() {
    let bounds =
        Bounds { page_size: 2, max_running: 8, prefill_chunk: 8, mixed_chunk: None, num_speculative_tokens: 0 };
    let mut harness = Harness::with_replicas((2, 1), 9, bounds, false, None);
    for (first, length) in [(0, 2), (1, 16), (2, 2)] {
        harness.submit(request(&[first; 2], length), None, None);
    }
    while harness.step() {
        let running = harness.scheduler.running();
        assert!(
            running.iter().all(|sequence| sequence.replica == sequence.arrival as usize % 2 || sequence.arrival == 2)
        );
    }
    harness.finish();
}
