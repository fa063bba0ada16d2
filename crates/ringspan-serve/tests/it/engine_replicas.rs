//! Tests of attention replicas: each computes sequences of its own, and experts are shared over all of them.

use super::engine::{ask, close, collect, greedy, small};
use super::engine_adapters::adapted;
use super::engine_parallel::{Sizes, of_sizes, serves_as_one_rank, start_on};
use crate::support::*;
use ringspan_serve::engine::request::{EngineClient, Request};
use ringspan_serve::engine::{Engine, EngineOptions, KvCacheSize};
use ringspan_serve::{Mesh, Model};
use std::sync::Arc;

/// A mesh of (pp, attn_dp) and (ring, ulysses, tp, ep).
fn replicated((pp, attn_dp): (usize, usize), sizes: Sizes) -> Mesh {
    Mesh { pp, attn_dp, ..of_sizes(sizes) }
}

#[test]
fn replicas_serve_as_one_rank() {
    let dense = [((1, 2), (1, 1, 1, 1)), ((1, 3), (1, 1, 1, 1)), ((1, 2), (2, 1, 2, 1)), ((2, 2), (2, 1, 1, 1))];
    for (name, model) in [("qwen3", qwen3()), ("gemma3", gemma3())] {
        serves_as_one_rank(name, &Arc::new(model), dense.map(|(outer, sizes)| replicated(outer, sizes)));
    }
    // Experts are shared within a replica, over all ranks of all replicas, and over groups that belong to two replicas each.
    let sparse = [
        ((1, 2), (1, 1, 1, 1)),
        ((1, 2), (1, 1, 1, 2)),
        ((1, 2), (2, 1, 1, 2)),
        ((1, 2), (2, 1, 1, 4)),
        ((1, 2), (3, 1, 1, 2)),
        ((1, 2), (1, 1, 2, 2)),
        ((1, 3), (1, 1, 2, 3)),
        ((2, 2), (1, 1, 1, 2)),
        ((2, 2), (2, 1, 1, 4)),
    ];
    for name in ["qwen3_moe", "deepseek_v3"] {
        let model = if name == "qwen3_moe" { qwen3_moe() } else { of_fixture(name) };
        let meshes = sparse.iter().filter(|(_, (.., ep))| name == "qwen3_moe" || *ep != 3);
        serves_as_one_rank(name, &Arc::new(model), meshes.map(|(outer, sizes)| replicated(*outer, *sizes)));
    }
}

/// Many requests at a time, of which each replica has some, and adapters among them.
#[test]
fn requests_of_all_replicas_share_a_step() {
    for (model, outer, sizes) in [
        (qwen3 as fn() -> Model, (1, 2), (1, 1, 1, 1)),
        (qwen3, (2, 2), (2, 1, 1, 1)),
        (qwen3_moe, (1, 2), (2, 1, 1, 4)),
        (qwen3_moe, (1, 3), (1, 1, 1, 3)),
    ] {
        let (base, folder) = (model(), tempfile::tempdir().expect("a folder"));
        let models = [&adapted(&base, 2, 5, folder.path()), &base];
        let prompts: Vec<Vec<u32>> = (0..9).map(|seed| tokens(3 + 5 * seed, seed as u64)).collect();
        let expected: Vec<Vec<u32>> =
            prompts.iter().enumerate().map(|(at, prompt)| recomputed(models[at % 2], prompt, 12)).collect();
        let mesh = replicated(outer, sizes);
        let engine = start_on(&Arc::new(base), mesh.clone(), &small());
        engine.client().load_adapter("tales", folder.path()).expect("loaded");
        for _ in 0..2 {
            let submit = |(at, prompt): (usize, &Vec<u32>)| {
                let adapter = (at % 2 == 0).then(|| "tales".to_owned());
                engine.client().submit(Request { adapter, ..greedy(prompt, 12) }).expect("taken")
            };
            let all: Vec<_> = prompts.iter().enumerate().map(submit).collect();
            for (events, expected) in all.into_iter().zip(&expected) {
                assert_eq!(&collect(events).tokens, expected, "{mesh}");
            }
        }
        engine.client().check_health().expect("healthy");
        let cached: Vec<usize> = engine.client().metrics().ranks.iter().map(|rank| rank.pages_cached).collect();
        assert!(cached.iter().all(|pages| *pages > 0), "{mesh}: {cached:?}");
        engine.shutdown(true).expect("ended");
    }
}

/// A sequence is no longer than the pages of its replica allow, and texts wait where all replicas are full.
#[test]
fn each_replica_has_pages_of_its_own() {
    let model = Arc::new(qwen3());
    let options = EngineOptions { kv_cache: KvCacheSize::Pages(4), max_model_len: None, page_size: 4, ..small() };
    let engine = start_on(&model, replicated((1, 3), (2, 1, 1, 1)), &options);
    let limits = engine.client().limits();
    assert_eq!((limits.ranks, limits.attn_dp, limits.cp, limits.max_model_len), (6, 3, 2, 32));
    let prompts: Vec<Vec<u32>> = (0..7).map(|seed| tokens(20, seed)).collect();
    let all: Vec<_> = prompts.iter().map(|prompt| engine.client().submit(greedy(prompt, 12)).expect("taken")).collect();
    for (events, prompt) in all.into_iter().zip(&prompts) {
        assert_eq!(collect(events).tokens, recomputed(&model, prompt, 12));
    }
}

/// Sessions know texts, not replicas: they are restored on another number of them.
#[test]
fn a_session_is_restored_on_another_number_of_replicas() {
    let (model, folder) = (Arc::new(qwen3()), tempfile::tempdir().expect("a folder"));
    let prompts: Vec<Vec<u32>> = (0..5).map(|seed| tokens(12 + 3 * seed, seed as u64)).collect();
    let start = |attn_dp, sizes| -> Engine { start_on(&model, replicated((1, attn_dp), sizes), &small()) };
    let cold = start(1, (1, 1, 1, 1));
    for (from, to) in [
        ((2, (1, 1, 1, 1)), (1, (3, 1, 1, 1))),
        ((1, (2, 1, 1, 1)), (3, (1, 1, 1, 1))),
        ((3, (1, 1, 2, 1)), (2, (2, 1, 1, 1))),
    ] {
        let file = folder.path().join("session.safetensors");
        let first = start(from.0, from.1);
        let all: Vec<_> =
            prompts.iter().map(|prompt| first.client().submit(greedy(prompt, 6)).expect("taken")).collect();
        let texts: Vec<Vec<u32>> =
            prompts.iter().zip(all).map(|(prompt, events)| [prompt.clone(), collect(events).tokens].concat()).collect();
        let saved = first.client().save_session(&file, "a model").expect("saved");
        let engine = start(to.0, to.1);
        let restored = engine.client().restore_session(&file, "a model").expect("restored");
        assert_eq!(restored, saved);
        for text in &texts {
            let longer = [text.as_slice(), &tokens(5, 77)].concat();
            let (answer, expected) = (ask(&engine, greedy(&longer, 9)), ask(&cold, greedy(&longer, 9)));
            assert_eq!((answer.cached, &answer.tokens), (text.len() - 1, &expected.tokens), "{from:?} to {to:?}");
            close(&answer.logprobs, &expected.logprobs);
        }
    }
}

/// A text that two replicas have is saved once.
#[test]
fn a_session_has_the_texts_of_all_replicas_once() {
    let (model, folder) = (Arc::new(qwen3()), tempfile::tempdir().expect("a folder"));
    let file = folder.path().join("session.safetensors");
    let engine = start_on(&model, replicated((1, 2), (1, 1, 1, 1)), &small());
    let prompt = tokens(40, 3);
    let all: Vec<_> = (0..14).map(|_| engine.client().submit(greedy(&prompt, 20)).expect("taken")).collect();
    let texts: Vec<Vec<u32>> = all.into_iter().map(|events| collect(events).tokens).collect();
    assert!(texts.iter().all(|text| *text == texts[0]));
    engine.client().check_health().expect("healthy");
    let cached: Vec<usize> = engine.client().metrics().ranks.iter().map(|rank| rank.pages_cached).collect();
    assert!(cached.iter().all(|pages| *pages >= 10), "more than eight requests crowd a replica: {cached:?}");
    let saved = engine.client().save_session(&file, "a model").expect("saved");
    // The health check leaves no text, and the last generated token never passed through the model.
    assert_eq!(saved.tokens, 40 + 20 - 1);
    let other = start_on(&model, replicated((1, 2), (1, 1, 1, 1)), &small());
    assert_eq!(other.client().restore_session(&file, "a model").expect("restored"), saved);
}
