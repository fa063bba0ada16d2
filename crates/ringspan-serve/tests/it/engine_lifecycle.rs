//! Tests of an engine's life: many clients that come and leave, refusals, the ways to end, health and metrics.

use super::engine::{ask, collect, greedy, no_page_is_held, small, start};
use crate::support::*;
use ringspan_serve::Mesh;
use ringspan_serve::engine::request::{EngineClient, Event, Refusal};
use ringspan_serve::engine::{Engine, EngineOptions, KvCacheSize};
use std::sync::Arc;

#[test]
fn two_hundred_clients_that_leave_when_they_like_lose_nothing_and_leave_nothing() {
    let model = Arc::new(qwen3());
    let options =
        EngineOptions { kv_cache: KvCacheSize::Pages(60), max_model_len: Some(120), max_running: 12, ..small() };
    let engine = start(&model, 2, &options);
    let beginning = tokens(24, 1);
    let texts: Vec<(Vec<u32>, Vec<u32>)> = (0..8)
        .map(|i| {
            let prompt = [&beginning[..3 * i], &tokens(1 + 5 * i, 40 + i as u64)].concat();
            let text = recomputed(&model, &prompt, 12);
            (prompt, text)
        })
        .collect();
    let (client, texts) = (engine.client(), &texts);
    std::thread::scope(|scope| {
        for number in 0..200usize {
            let client = client.clone();
            scope.spawn(move || {
                let (prompt, text) = &texts[number % texts.len()];
                let mut events = client.submit(greedy(prompt, 12)).expect("taken");
                let leaves = (number * 7919 % 23).min(13);
                let mut answer = Vec::new();
                while answer.len() < leaves {
                    match events.blocking_recv() {
                        Some(Event::Started { .. }) => {}
                        Some(Event::Token(token, _)) => answer.push(token),
                        Some(Event::Finished { .. }) => break,
                        other => panic!("client {number}: {other:?}"),
                    }
                }
                assert_eq!(answer, text[..leaves.min(12)], "client {number}");
            });
        }
    });
    no_page_is_held(&engine);
    assert!(client.metrics().ranks.iter().all(|rank| rank.pages_cached <= 60));
    engine.shutdown(true).expect("ended");
}

#[test]
fn too_many_requests_are_refused_and_a_drained_engine_finishes_what_it_has() {
    let model = Arc::new(qwen3());
    let engine = start(&model, 1, &EngineOptions { max_waiting: 2, max_running: 1, ..small() });
    let client = engine.client();
    let mut taken = Vec::new();
    let busy = loop {
        match client.submit(greedy(&tokens(30, 1), 60)) {
            Ok(events) => taken.push(events),
            Err(refusal) => break refusal,
        }
    };
    assert!(matches!(busy, Refusal::Busy { waiting } if waiting >= 2), "{busy:?}");
    engine.shutdown(true).expect("ended");
    assert!(matches!(client.submit(greedy(&[1], 1)), Err(Refusal::Stopped(_))));
    assert!(client.check_health().is_err());
    for events in taken {
        assert_eq!(collect(events).tokens.len(), 60);
    }
}

#[test]
fn an_engine_that_is_stopped_fails_what_it_has() {
    let model = Arc::new(qwen3());
    let engine = start(&model, 2, &small());
    let events = engine.client().submit(greedy(&tokens(30, 1), 300)).expect("taken");
    engine.shutdown(false).expect("ended");
    assert!(collect(events).failure.expect("a failure").contains("shut down"));
}

#[test]
fn health_is_a_token_through_every_rank_and_metrics_count_what_they_send() {
    let model = Arc::new(qwen3());
    let engine = start(&model, 3, &small());
    let client = engine.client();
    for _ in 0..2 {
        client.check_health().expect("healthy");
    }
    assert!(client.metrics().ranks.iter().all(|rank| rank.pages_used == 0));
    ask(&engine, greedy(&tokens(30, 1), 5));
    client.check_health().expect("healthy");
    let metrics = client.metrics();
    assert_eq!((metrics.prompt_tokens, metrics.generation_tokens), (30, 5));
    assert!(metrics.steps > 5);
    assert!(metrics.ranks.iter().all(|rank| rank.transfer_bytes > 0 && rank.wait_seconds > 0.0), "{metrics:?}");
    let limits = client.limits();
    assert_eq!((limits.ranks, limits.vocabulary, limits.hidden_size, limits.page_size), (3, VOCABULARY, 32, 4));
}

#[test]
fn an_engine_that_cannot_start_says_why() {
    let model = Arc::new(qwen3());
    let error = |mesh: Mesh, options: EngineOptions| {
        Engine::start(model.clone(), mesh, &options).expect_err("it cannot start").to_string()
    };
    let few = error(mesh(2, 1), EngineOptions { kv_cache: KvCacheSize::Pages(3), ..small() });
    assert!(few.contains("400 tokens") && few.contains("50 pages") && few.contains("24 tokens"), "{few}");
    let heads = error(mesh(1, 5), small());
    assert!(heads.contains("ulysses 5") && heads.contains('4'), "{heads}");
}
