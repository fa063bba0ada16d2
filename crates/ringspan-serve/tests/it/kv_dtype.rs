//! Caches in other types than the model's: what is generated from them, and what does not fit into them.

use super::engine::{Completion, ask, close, greedy, small, start};
use crate::support::*;
use ringspan_serve::Model;
use ringspan_serve::engine::{Engine, EngineOptions, KvCacheSize};
use ringspan_serve::paged::{KvDtype, PagedCache};
use std::sync::Arc;

/// The text and log-probabilities of prompts on a mesh: each is asked for twice, and found in the cache the second time.
fn answer(model: &Arc<Model>, ring: usize, kv_dtype: Option<KvDtype>) -> Vec<Completion> {
    let engine = start(model, ring, &EngineOptions { kv_dtype, ..small() });
    let ask_for = |seed: u64| {
        let request = || greedy(&tokens(20 + 35 * seed as usize, seed), 24);
        let (cold, cached) = (ask(&engine, request()), ask(&engine, request()));
        assert_eq!(cold.tokens, cached.tokens, "ring {ring}, {kv_dtype:?}");
        close(&cold.logprobs, &cached.logprobs);
        cold
    };
    let all = [1, 2, 3].map(ask_for).into();
    engine.shutdown(true).expect("ended");
    all
}

/// The largest difference of log-probabilities as long as the tokens are the same.
fn difference(a: &[Completion], b: &[Completion]) -> f32 {
    let all =
        a.iter().zip(b).flat_map(|(a, b)| a.logprobs.iter().zip(&b.logprobs).take_while(|(a, b)| a.token == b.token));
    all.map(|(a, b)| (a.logprob - b.logprob).abs()).fold(0.0, f32::max)
}

#[test]
fn texts_from_a_narrower_cache_are_equal_on_every_mesh() {
    let model = Arc::new(wide_heads());
    let exact = answer(&model, 1, None);
    for (kv_dtype, bound) in [(KvDtype::F32, 1e-4), (KvDtype::Bf16, 0.05), (KvDtype::Q8_0, 0.05)] {
        let one = answer(&model, 1, Some(kv_dtype));
        let rounded = difference(&one, &exact);
        assert!(rounded <= bound, "{kv_dtype:?}: log-probabilities are {rounded} apart from those of f32");
        assert!(kv_dtype == KvDtype::F32 || rounded > 1e-6, "{kv_dtype:?} rounds nothing");
        for ring in [2, 3, 4] {
            let several = answer(&model, ring, Some(kv_dtype));
            for (one, several) in one.iter().zip(&several) {
                assert_eq!(one.tokens, several.tokens, "ring {ring}, {kv_dtype:?}");
            }
            let between = difference(&one, &several);
            assert!(between <= 0.1 * bound.max(1e-3), "ring {ring}, {kv_dtype:?}: {between} apart from one rank");
        }
    }
}

#[test]
fn a_cache_in_blocks_takes_17_bytes_where_bf16_takes_32() {
    let model = wide_heads();
    let bytes = |dtype| PagedCache::with_dtype(&model, 3, 16, Some(dtype)).expect("a cache").bytes();
    let numbers = 3 * 16 * 2 * 2 * 2 * 64;
    assert_eq!(bytes(KvDtype::F32), 4 * numbers);
    assert_eq!(bytes(KvDtype::Bf16), 2 * numbers);
    assert_eq!(bytes(KvDtype::Q8_0), 17 * numbers / 16);
    let of_page = PagedCache::bytes_per_page(&model, 16, Some(KvDtype::Q8_0)).expect("bytes");
    assert_eq!(3 * of_page, bytes(KvDtype::Q8_0));
}

#[test]
fn more_tokens_fit_into_the_same_memory() {
    let model = Arc::new(wide_heads());
    let limits = |kv_dtype| {
        let options = EngineOptions { kv_cache: KvCacheSize::Bytes(1 << 20), kv_dtype, max_model_len: None, ..small() };
        let engine = start(&model, 2, &options);
        ringspan_serve::engine::request::EngineClient::limits(&engine.client())
    };
    // A page of one of the two layers takes 4096 and 1088 bytes; the layer with a window has fewer pages than the other.
    for (kv_dtype, page_bytes) in [(None, 4096), (Some(KvDtype::Q8_0), 1088)] {
        let limits = limits(kv_dtype);
        let (full, window) = (limits.pages_per_rank as u64, limits.window_pages_per_rank as u64);
        assert_eq!(limits.cache_bytes, page_bytes * (full + window), "{kv_dtype:?}");
        assert_eq!(full + window, (1 << 20) / page_bytes, "{kv_dtype:?}");
        assert!(full > window, "{kv_dtype:?}: {limits:?}");
    }
}

#[test]
fn heads_that_are_not_whole_blocks_are_refused() {
    let model = Arc::new(qwen3());
    let options = EngineOptions { kv_dtype: Some(KvDtype::Q8_0), ..small() };
    let refused = Engine::start(model.clone(), mesh(2, 1), &options).expect_err("heads of width 8").to_string();
    for part in ["kv-dtype q8_0", "32 numbers", "width of 8", "f32 and bf16"] {
        assert!(refused.contains(part), "{refused}");
    }
    let refused = PagedCache::with_dtype(&model, 3, 16, Some(KvDtype::Q8_0)).expect_err("heads of width 8");
    assert!(refused.to_string().contains("width of 8"));
    assert!("q4_0".parse::<KvDtype>().expect_err("unknown").contains("f32, bf16 and q8_0"));
    assert_eq!("q8_0".parse(), Ok(KvDtype::Q8_0));
}
