//! Tests of what the engine measures of its requests and steps.

use super::engine::{ask, collect, greedy, small, start};
use super::engine_adapters::adapted;
use crate::support::*;
use ringspan_serve::engine::request::{EngineClient, Metrics, Request};
use ringspan_serve::engine::{Engine, EngineOptions, KvCacheSize};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The metrics once they hold; the engine publishes them after the events of a step.
fn metrics_when(engine: &Engine, what: &str, holds: impl Fn(&Metrics) -> bool) -> Metrics {
    let began = Instant::now();
    loop {
        let metrics = engine.client().metrics();
        if holds(&metrics) {
            return metrics;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{what}: {metrics:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn each_phase_of_a_request_is_measured() {
    let model = Arc::new(qwen3());
    // One at a time, so that the second request waits for all of the first.
    let options = EngineOptions { max_running: 1, prefix_cache: false, ..small() };
    let engine = start(&model, 2, &options);
    let client = engine.client();
    let began = Instant::now();
    let prompts = [tokens(60, 3), tokens(40, 4)];
    let all = prompts.clone().map(|prompt| client.submit(greedy(&prompt, 30)).expect("taken"));
    let answers = all.map(collect);
    let took = began.elapsed().as_secs_f64();
    let histograms = metrics_when(&engine, "two requests", |now| now.histograms.queue_time.count() == 2).histograms;
    let of = [&histograms.queue_time, &histograms.prefill_time, &histograms.decode_time, &histograms.inference_time];
    assert_eq!(of.map(|histogram| histogram.count()), [2; 4]);
    let [queue, prefill, decode, inference] = of.map(|histogram| histogram.sum());
    assert!((prefill + decode - inference).abs() < 1e-9, "{prefill} + {decode} is not {inference}");
    assert!(prefill > 0.0 && decode > 0.0 && inference <= took, "{prefill}, {decode}, {inference} of {took}");
    assert!(queue > 0.0 && queue + inference <= 2.0 * took, "{queue} and {inference} of two in {took}");
    // Each token of a prompt is read once, and each generated one drawn once.
    let tokens: usize = prompts.iter().zip(&answers).map(|(prompt, answer)| prompt.len() + answer.tokens.len()).sum();
    let steps = metrics_when(&engine, "all steps", |now| now.histograms.step_tokens.count() == now.steps);
    assert_eq!(steps.histograms.step_tokens.sum(), tokens as f64);
}

/// The second request waits from when it is asked for until the first has ended: as long as the first runs, less the time between the
/// two.
#[test]
fn a_request_is_queued_until_the_one_before_it_has_ended() {
    let options = EngineOptions {
        max_running: 1,
        kv_cache: KvCacheSize::Pages(20_000),
        max_model_len: Some(60_000),
        prefix_cache: false,
        ..small()
    };
    let engine = start(&Arc::new(qwen3()), 1, &options);
    let began = Instant::now();
    let first = engine.client().submit(greedy(&tokens(60, 3), 30)).expect("taken");
    let second = engine.client().submit(greedy(&tokens(40, 4), 50_000)).expect("taken");
    let between = began.elapsed().as_secs_f64();
    // The second runs until its client leaves.
    let ended = metrics_when(&engine, "the first", |now| now.histograms.inference_time.count() == 1);
    drop(second);
    let both = metrics_when(&engine, "both", |now| now.histograms.queue_time.count() == 2);
    let [inference, queued] = [ended.histograms.inference_time, both.histograms.queue_time].map(|times| times.sum());
    assert!(inference > 0.0 && queued >= inference - between, "{queued} of {inference}, {between} between them");
    drop(first);
}

/// A request without a text is prefilled all the time, and one whose client leaves counts as well.
#[test]
fn requests_without_an_end_of_their_text_are_measured_too() {
    let engine = start(&Arc::new(qwen3()), 1, &small());
    ask(&engine, greedy(&tokens(20, 3), 0));
    let mut events = engine.client().submit(greedy(&tokens(20, 4), 300)).expect("taken");
    while !matches!(events.blocking_recv(), Some(ringspan_serve::engine::request::Event::Token(..))) {}
    drop(events);
    let histograms = metrics_when(&engine, "two requests", |now| now.histograms.decode_time.count() == 2).histograms;
    assert_eq!(histograms.inference_time.count(), 2);
}

#[test]
fn the_adapters_of_running_and_waiting_requests_are_named() {
    let base = qwen3();
    let folder = tempfile::tempdir().expect("a folder");
    adapted(&base, 2, 5, folder.path());
    let engine = start(&Arc::new(base), 1, &EngineOptions { max_running: 1, ..small() });
    let client = engine.client();
    client.load_adapter("tales", folder.path()).expect("loaded");
    client.load_adapter("verses", folder.path()).expect("loaded");
    let with = |name: &str| Request { adapter: Some(name.into()), ..greedy(&tokens(9, 3), 380) };
    let both = ["tales", "verses"].map(|name| client.submit(with(name)).expect("taken"));
    let names =
        |now: &Metrics| (Vec::from_iter(now.running_adapters.clone()), Vec::from_iter(now.waiting_adapters.clone()));
    metrics_when(&engine, "one runs and one waits", |now| {
        names(now) == (vec!["tales".to_owned()], vec!["verses".to_owned()])
    });
    drop(both);
    metrics_when(&engine, "none is there", |now| names(now) == (vec![], vec![]));
}
