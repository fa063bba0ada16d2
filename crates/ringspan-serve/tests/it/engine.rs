//! Tests of the engine over real models: the events of a request do not depend on the mesh, on other requests, on the contents
//! of the cache, or on preemption.

use crate::support::*;
use ringspan_serve::engine::request::{
    EngineClient, Event, Events, FinishReason, Pooling, Request, SamplingParams, TokenLogprobs,
};
use ringspan_serve::engine::{Engine, EngineOptions, KvCacheSize};
use ringspan_serve::{Mesh, Model};
use std::sync::Arc;
use std::time::Duration;

/// The meshes of the tests: 1 to 4 ranks.
const RINGS: [usize; 4] = [1, 2, 3, 4];

pub(super) fn small() -> EngineOptions {
    EngineOptions {
        page_size: 4,
        kv_cache: KvCacheSize::Pages(400),
        max_model_len: Some(400),
        max_running: 16,
        prefill_chunk: 16,
        deadline: Duration::from_secs(30),
        ..EngineOptions::default()
    }
}

pub(super) fn start(model: &Arc<Model>, ring: usize, options: &EngineOptions) -> Engine {
    start_on(model, (ring, 1), options)
}

fn start_on(model: &Arc<Model>, (ring, ulysses): (usize, usize), options: &EngineOptions) -> Engine {
    let mesh = Mesh { deadline: Duration::from_secs(60), ..mesh(ring, ulysses) };
    Engine::start(model.clone(), mesh, options).expect("an engine")
}

pub(super) fn greedy(prompt: &[u32], max_tokens: usize) -> Request {
    Request { sampling: SamplingParams::greedy(), logprobs: Some(3), ..Request::new(prompt.to_vec(), max_tokens) }
}

/// Like [`greedy`], without probabilities: only which token is the most likely one crosses from rank to rank.
pub(super) fn most_likely(prompt: &[u32], max_tokens: usize) -> Request {
    Request { logprobs: None, ..greedy(prompt, max_tokens) }
}

/// All that a client heard.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Completion {
    pub(super) tokens: Vec<u32>,
    pub(super) logprobs: Vec<TokenLogprobs>,
    pub(super) prompt: Vec<Option<TokenLogprobs>>,
    embedding: Vec<f32>,
    pub(super) end: Option<FinishReason>,
    pub(super) cached: usize,
    pub(super) failure: Option<String>,
}

pub(super) fn collect(mut events: Events) -> Completion {
    let mut answer = Completion::default();
    while let Some(event) = events.blocking_recv() {
        assert!(answer.end.is_none() && answer.failure.is_none(), "{event:?} after the end");
        match event {
            Event::Prompt(logprobs) => answer.prompt = logprobs,
            Event::Embedding(vector) => answer.embedding = vector,
            Event::Token(token, logprobs) => {
                answer.tokens.push(token);
                answer.logprobs.extend(logprobs);
            }
            Event::Started { cached_tokens } => answer.cached = cached_tokens,
            Event::Finished { reason } => answer.end = Some(reason),
            Event::Failed(problem) => answer.failure = Some(problem),
        }
    }
    assert!(answer.end.is_some() || answer.failure.is_some(), "events ended without an end");
    answer
}

pub(super) fn ask(engine: &Engine, request: Request) -> Completion {
    collect(engine.client().submit(request).expect("taken"))
}

pub(super) fn close(a: &[TokenLogprobs], b: &[TokenLogprobs]) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert_eq!(a.token, b.token);
        assert!((a.logprob - b.logprob).abs() < 1e-4, "{a:?} and {b:?}");
    }
}

pub(super) fn no_page_is_held(engine: &Engine) {
    // The numbers are published after each step.
    for _ in 0..200 {
        let metrics = engine.client().metrics();
        if metrics.running + metrics.waiting == 0 && metrics.ranks.iter().all(|rank| rank.pages_used == 0) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("pages or requests are left: {:?}", engine.client().metrics());
}

/// The models of the tests: full attention, windows, windows and full attention in turn, experts.
fn models() -> Vec<(&'static str, Arc<Model>)> {
    vec![
        ("qwen3", Arc::new(qwen3())),
        ("mistral", Arc::new(mistral(7))),
        ("gemma3", Arc::new(gemma3())),
        ("qwen3_moe", Arc::new(qwen3_moe())),
    ]
}

#[test]
fn long_greedy_and_seeded_texts_are_equal_on_every_mesh_and_equal_recomputation() {
    let model = Arc::new(qwen3());
    let prompt = tokens(37, 3);
    let expected = recomputed(&model, &prompt, 40);
    let mut first: Option<(Completion, Completion)> = None;
    for ring in RINGS {
        let engine = start(&model, ring, &small());
        let (one, other) = (ask(&engine, greedy(&prompt, 256)), ask(&engine, seeded_of(&prompt, 256)));
        assert_eq!(one.tokens[..40], expected, "{ring} ranks");
        assert_eq!(ask(&engine, most_likely(&prompt, 256)).tokens, one.tokens, "{ring} ranks");
        assert_eq!((one.tokens.len(), one.end), (256, Some(FinishReason::Length)));
        assert_ne!(one.tokens, other.tokens);
        if let Some((greedy, seeded)) = &first {
            assert_eq!((&one.tokens, &other.tokens), (&greedy.tokens, &seeded.tokens), "{ring} ranks");
            close(&one.logprobs, &greedy.logprobs);
            close(&other.logprobs, &seeded.logprobs);
        }
        first.get_or_insert((one, other));
        engine.shutdown(true).expect("ended");
    }
}

pub(super) fn seeded_of(prompt: &[u32], max_tokens: usize) -> Request {
    let sampling = SamplingParams {
        temperature: 1.2,
        top_k: Some(50),
        top_p: Some(0.95),
        seed: Some(11),
        ..SamplingParams::default()
    };
    Request { sampling, ..greedy(prompt, max_tokens) }
}

/// The most important property: a client gets the same events whatever is in the cache, also when a hit ends in the middle of a
/// page, and whatever other requests run.
#[test]
fn a_hit_equals_a_cold_run_on_every_mesh_for_every_kind_of_layer_mixed_with_other_requests() {
    for (name, model) in models() {
        let whole = tokens(60, 8);
        for ring in RINGS {
            let cold = start(&model, ring, &EngineOptions { prefix_cache: false, ..small() });
            let warm = start(&model, ring, &small());
            ask(&warm, greedy(&whole, 3));
            for (shared, own) in [(60, 0), (59, 3), (32, 9), (30, 1), (29, 17), (1, 12), (0, 9)] {
                let prompt = [&whole[..shared], &tokens(own, 77 + own as u64)].concat();
                let expected = ask(&cold, greedy(&prompt, 9));
                // Other requests run meanwhile: one that shares more, and one that shares nothing.
                let client = warm.client();
                let others = [
                    client.submit(greedy(&[&whole[..], &tokens(5, own as u64)].concat(), 20)).expect("taken"),
                    client.submit(greedy(&tokens(31, 900 + shared as u64), 20)).expect("taken"),
                ];
                let hit = ask(&warm, greedy(&prompt, 9));
                assert_eq!(hit.tokens, expected.tokens, "{name}, {ring} ranks, {shared} of {} tokens", prompt.len());
                close(&hit.logprobs, &expected.logprobs);
                assert_eq!(expected.cached, 0);
                assert!(hit.cached >= shared.min(prompt.len() - 1), "{} of {shared} were found", hit.cached);
                others.into_iter().for_each(|events| {
                    collect(events);
                });
            }
            no_page_is_held(&warm);
        }
    }
}

#[test]
fn the_next_turn_of_a_chat_finds_the_generated_text_in_the_cache() {
    let model = Arc::new(gemma3());
    for ring in [1, 3] {
        let engine = start(&model, ring, &small());
        let mut chat = tokens(11, 4);
        for turn in 0..4 {
            let before = chat.len();
            let answer = ask(&engine, greedy(&chat, 7));
            assert_eq!(answer.tokens, recomputed(&model, &chat, 7), "{ring} ranks, turn {turn}");
            if turn > 0 {
                // The last token of the answer never passed through the model, and two are new.
                assert_eq!(answer.cached, before - 3);
            }
            chat.extend(answer.tokens);
            chat.extend(tokens(2, turn));
        }
        let metrics = engine.client().metrics();
        assert!(metrics.prefix_cache_hits > 0 && metrics.prefix_cache_hits < metrics.prefix_cache_queries);
    }
}

#[test]
fn what_a_request_hears_does_not_depend_on_its_batch_mates() {
    let model = Arc::new(qwen3());
    let sampled = |seed: u64, prompt: &[u32]| {
        let sampling = SamplingParams {
            temperature: 1.0,
            min_p: Some(0.02),
            repetition_penalty: 1.1,
            presence_penalty: 0.3,
            seed: Some(seed),
            ..SamplingParams::default()
        };
        Request { sampling, ..greedy(prompt, 24) }
    };
    let prompts: Vec<Vec<u32>> = (0..10).map(|i| tokens(1 + 7 * i, i as u64)).collect();
    let options = EngineOptions { prefix_cache: false, ..small() };
    let alone = start(&model, 1, &options);
    let expected: Vec<Completion> =
        prompts.iter().enumerate().map(|(i, prompt)| ask(&alone, sampled(i as u64, prompt))).collect();
    for grid in MESHES {
        let engine = start_on(&model, grid, &options);
        let client = engine.client();
        let all: Vec<Events> = prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| client.submit(sampled(i as u64, prompt)).expect("taken"))
            .collect();
        for (i, (events, expected)) in all.into_iter().zip(&expected).enumerate() {
            let answer = collect(events);
            assert_eq!(answer.tokens, expected.tokens, "{grid:?}, request {i}");
            close(&answer.logprobs, &expected.logprobs);
        }
    }
}

#[test]
fn requests_that_are_put_back_go_on_as_if_nothing_had_happened() {
    let model = Arc::new(mistral(7));
    let prompts: Vec<Vec<u32>> = (0..6).map(|i| tokens(20 + i, i as u64)).collect();
    for (ring, prefix_cache) in [(1, true), (2, false), (3, true)] {
        let kv_cache = KvCacheSize::Pages(28usize.div_ceil(ring));
        let options = EngineOptions { kv_cache, max_model_len: Some(84), prefix_cache, ..small() };
        let engine = start(&model, ring, &options);
        let client = engine.client();
        let all: Vec<Events> = prompts.iter().map(|prompt| client.submit(greedy(prompt, 40)).expect("taken")).collect();
        for (events, prompt) in all.into_iter().zip(&prompts) {
            assert_eq!(collect(events).tokens, recomputed(&model, prompt, 40), "{ring} ranks");
        }
        assert!(client.metrics().preemptions > 0, "the test needs a cache that is too small");
        no_page_is_held(&engine);
    }
}

/// Log-probabilities of prompts and embeddings need hidden states of all tokens, also where these are in the cache.
#[test]
fn prompts_are_scored_and_embedded_on_every_mesh() {
    let model = Arc::new(gemma3());
    let prompt = tokens(41, 5);
    let expected = logits(&model, &prompt);
    for ring in RINGS {
        let engine = start(&model, ring, &small());
        ask(&engine, greedy(&prompt, 2));
        let scored = ask(&engine, Request { prompt_logprobs: Some(2), ..greedy(&prompt, 3) });
        assert_eq!(scored.prompt.len(), prompt.len());
        assert_eq!(scored.prompt[0], None);
        assert_eq!(scored.tokens, recomputed(&model, &prompt, 3));
        for (position, logprobs) in scored.prompt.iter().enumerate().skip(1) {
            let logprobs = logprobs.as_ref().expect("a token before it");
            let row = &expected[position - 1];
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let total: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
            let exact = f64::from(row[prompt[position] as usize] - max) - total.ln();
            assert_eq!(logprobs.token, prompt[position]);
            assert!((f64::from(logprobs.logprob) - exact).abs() < 1e-4, "position {position}, {ring} ranks");
            assert_eq!(logprobs.top.len(), 2);
        }
        let mean = ask(&engine, Request { embedding: Some(Pooling::Mean), ..greedy(&prompt, 0) });
        let last = ask(&engine, Request { embedding: Some(Pooling::Last), ..greedy(&prompt, 0) });
        let hidden = normed(&model, &prompt);
        let width = hidden[0].len();
        let of_mean: Vec<f32> = (0..width)
            .map(|i| hidden.iter().map(|row| f64::from(row[i])).sum::<f64>() as f32 / hidden.len() as f32)
            .collect();
        assert!(relative_l2(&mean.embedding, &of_mean) < 1e-5 && relative_l2(&last.embedding, &hidden[40]) < 1e-5);
        assert_eq!((mean.end, last.end), (Some(FinishReason::Length), Some(FinishReason::Length)));
        let one = ask(&engine, Request { prompt_logprobs: Some(0), ..greedy(&[5], 0) });
        assert_eq!(one.prompt, [None]);
    }
}

#[test]
fn stop_tokens_and_limits_end_a_text() {
    let model = Arc::new(qwen3());
    let prompt = tokens(9, 2);
    let all = recomputed(&model, &prompt, 16);
    let engine = start(&model, 2, &EngineOptions { max_model_len: Some(20), ..small() });
    let first = all.iter().position(|token| *token == all[7]).expect("it is there");
    let stopped = ask(&engine, Request { stop_token_ids: vec![all[7]], ..greedy(&prompt, 11) });
    assert_eq!(
        (stopped.tokens.as_slice(), stopped.end),
        (&all[..first], Some(FinishReason::Stop { token: Some(all[7]) }))
    );
    let full = ask(&engine, greedy(&prompt, 1000));
    assert_eq!((full.tokens.as_slice(), full.end), (&all[..11], Some(FinishReason::Length)));
    let nothing = ask(&engine, greedy(&prompt, 0));
    assert_eq!((nothing.tokens.len(), nothing.end), (0, Some(FinishReason::Length)));
    let refused = engine.client().submit(greedy(&tokens(21, 1), 1)).expect_err("too long").to_string();
    assert!(refused.contains("21 tokens") && refused.contains("20"), "{refused}");
}

/// Final-normed hidden states of all tokens, on one rank without a cache.
fn normed(model: &Model, tokens: &[u32]) -> Vec<Vec<f32>> {
    use ringspan::{Documents, Layout, LayoutKind, StrategyKind};
    let work = |group: Arc<ringspan::Group>| -> ringspan_serve::Result<Vec<Vec<f32>>> {
        let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(1, tokens.len()), 1)?;
        let context = ringspan_candle::Context::new(group, Arc::new(layout), StrategyKind::Ring)?;
        let hidden = model.hidden(0, tokens, &context)?;
        Ok(model.decoder().norm(model.weights(0), &hidden)?.to_vec2()?)
    };
    Mesh::single().run(work).expect("one rank").remove(0)
}
