//! Tests of sliding-window layers: the cache holds their window only, and texts do not depend on how much of it was evicted.

use super::engine::{ask, close, collect, greedy, small, start};
use crate::support::*;
use ringspan_serve::engine::request::{EngineClient, Event};
use ringspan_serve::engine::{Engine, EngineOptions, KvCacheSize};
use ringspan_serve::{Mesh, Model};
use std::sync::Arc;

/// A long prompt and a long text, while the numbers of pages are watched.
#[test]
fn window_layers_hold_their_window_and_two_pages_on_each_rank_after_a_long_text() {
    for (model, window) in [(gemma3(), 7usize), (mistral(40), 40), (mistral(1), 1)] {
        let model = Arc::new(model);
        for ring in [1, 2, 3, 4] {
            let options = EngineOptions { kv_cache: KvCacheSize::Pages(400), max_model_len: Some(700), ..small() };
            let engine = start(&model, ring, &options);
            let client = engine.client();
            let (mut most, mut most_full) = (0, 0);
            // A busy machine may read the last events when the request has ended, and so miss its last pages: then it asks again.
            for seed in 5..15 {
                let mut events = client.submit(greedy(&tokens(400, seed), 250)).expect("taken");
                let mut texts = 0;
                while let Some(event) = events.blocking_recv() {
                    texts += usize::from(matches!(event, Event::Token(..)));
                    for rank in &client.metrics().ranks {
                        most = most.max(rank.window_pages_used);
                        most_full = most_full.max(rank.pages_used);
                    }
                }
                assert_eq!(texts, 250);
                if most_full >= 640 / 4 / ring {
                    break;
                }
            }
            assert!(most > 0 && most <= window.div_ceil(4).div_ceil(ring) + 2, "{ring} ranks: {most} pages, {window}");
            assert!(most_full >= 640 / 4 / ring, "{ring} ranks: {most_full} pages of full-attention layers");
            engine.shutdown(true).expect("ended");
        }
    }
}

/// Pages of windows are so few that most of what the prefix cache knows has lost them.
#[test]
fn a_hit_equals_a_cold_run_where_pages_of_windows_are_scarce() {
    let of = |ring, tp| Mesh { tp, ..mesh(ring, 1) };
    for (name, model, page, room) in [
        ("gemma3", gemma3(), 4, 330),
        ("a window smaller than a page", gemma3(), 16, 700),
        ("windows alone", mistral(7), 4, 330),
        ("a window larger than any text", mistral(4096), 4, 900),
    ] {
        let model = Arc::new(model);
        let whole = tokens(60, 8);
        let mut found_beside_another = 0;
        for (ring, tp) in [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)] {
            // Bytes of a page of a layer are 128 for each token.
            let kv_cache = KvCacheSize::Bytes(128 * room);
            let options = EngineOptions {
                page_size: page,
                kv_cache,
                max_model_len: Some(120),
                max_running: 2,
                num_speculative_tokens: 3,
                ..small()
            };
            let start =
                |options: &EngineOptions| Engine::start(model.clone(), of(ring, tp), options).expect("an engine");
            let cold = start(&EngineOptions { prefix_cache: false, ..options.clone() });
            let warm = start(&options);
            for (shared, own) in [(60, 30), (60, 0), (59, 3), (32, 9), (30, 1), (29, 17), (1, 12), (60, 12), (60, 12)] {
                let prompt = [&whole[..shared], &tokens(own, 77 + own as u64)].concat();
                let expected = ask(&cold, greedy(&prompt, 20));
                let other = warm.client().submit(greedy(&tokens(31, 900 + shared as u64), 20)).expect("taken");
                let hit = ask(&warm, greedy(&prompt, 20));
                assert_eq!(hit.tokens, expected.tokens, "{name}, {ring} ranks, {shared} of {} tokens", prompt.len());
                close(&hit.logprobs, &expected.logprobs);
                found_beside_another += hit.cached;
                collect(other);
                // Which pages are left beside the other text depends on which of the two ends first. Once both have ended, nothing
                // evicts the pages of this one.
                ask(&warm, greedy(&prompt, 20));
                let again = ask(&warm, greedy(&prompt, 20));
                assert_eq!(again.tokens, expected.tokens, "{name}, {ring} ranks, {} tokens again", prompt.len());
                close(&again.logprobs, &expected.logprobs);
                assert!(again.cached > 0, "{name}, {ring} ranks: none of {} tokens is found again", prompt.len());
            }
            cold.shutdown(true).expect("ended");
            warm.shutdown(true).expect("ended");
        }
        assert!(found_beside_another > 0, "{name}: nothing was found while another text was computed");
    }
}

/// The same memory holds several times the text if most layers see a window.
#[test]
fn the_memory_of_a_cache_is_divided_between_the_kinds_of_layers() {
    let limits = |model: Model, bytes, max_model_len| {
        let options = EngineOptions { kv_cache: KvCacheSize::Bytes(bytes), max_model_len, ..small() };
        Engine::start(model, mesh(1, 1), &options).map(|engine| engine.client().limits())
    };
    let bytes = 2 * 512 * 100;
    let all = limits(qwen3(), bytes, None).expect("an engine");
    assert_eq!((all.pages_per_rank, all.window_pages_per_rank, all.cache_tokens()), (100, 0, 400));
    let both = limits(gemma3(), bytes, None).expect("an engine");
    assert!(both.max_model_len == 600 && both.cache_tokens() >= both.max_model_len, "{both:?}");
    assert!(both.cache_bytes <= bytes && both.cache_bytes > bytes - 2 * 512, "{both:?}");
    // Windows alone: as long a text as the model is made for.
    assert_eq!(limits(mistral(7), bytes, None).expect("an engine").max_model_len, 4096);
    let refused = limits(gemma3(), bytes, Some(4000)).expect_err("too long").to_string();
    for part in ["4000 tokens", "1000 pages", "515584 bytes"] {
        assert!(refused.contains(part), "{refused}");
    }
}
