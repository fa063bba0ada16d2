//! LoRA adapters that are loaded and unloaded while the engine runs, and mixed in one batch.

use super::engine::small;
use super::engine_parallel::{staged, start_on};
use crate::support::*;
use candle_core::{Device, Tensor};
use ringspan_candle::{DeviceName, Devices, Precision, Weight, Weights};
use ringspan_models::{Lora, adapter};
use ringspan_serve::engine::request::{EngineClient, Event, Events, Request, SamplingParams};
use ringspan_serve::engine::{Engine, EngineOptions, KvCacheSize};
use ringspan_serve::{Mesh, Model};
use std::path::Path;
use std::sync::Arc;

/// Writes an adapter of random matrices for `base`, and returns the model with it.
pub(super) fn adapted(base: &Model, rank: usize, seed: u64, folder: &Path) -> Model {
    adapted_by(base, Lora::of_all_layers(rank, 2.0 * rank as f64).expect("sizes"), seed, folder)
}

fn adapted_by(base: &Model, lora: Lora, seed: u64, folder: &Path) -> Model {
    let decoder = base.decoder().clone().with_lora(lora).expect("layers");
    let mut matrices = decoder.adapted(Weights::new(), seed).expect("matrices");
    for matrix in matrices.values_mut() {
        let numbers = tokens(matrix.elem_count(), seed + matrix.elem_count() as u64);
        let numbers: Vec<f32> = numbers.into_iter().map(|token| token as f32 / 97.0 - 0.5).collect();
        *matrix = Tensor::from_vec(numbers, matrix.dims(), &Device::Cpu).expect("its shape");
    }
    adapter::save(folder, Path::new("some/model"), decoder.lora().expect("attached"), &matrices).expect("written");
    let mut weights = base.weights(0).clone();
    weights.extend(matrices.into_iter().map(|(name, matrix)| (name, Weight::from(matrix))));
    Model::new(decoder, weights).expect("a model")
}

fn request(prompt: &[u32], adapter: Option<&str>) -> Request {
    Request {
        sampling: SamplingParams::greedy(),
        adapter: adapter.map(str::to_owned),
        ..Request::new(prompt.to_vec(), 10)
    }
}

fn text(mut events: Events) -> Vec<u32> {
    let mut text = Vec::new();
    while let Some(event) = events.blocking_recv() {
        match event {
            Event::Token(token, _) => text.push(token),
            Event::Started { .. } => {}
            Event::Finished { .. } => return text,
            other => panic!("{other:?}"),
        }
    }
    panic!("no end");
}

#[test]
fn requests_with_different_adapters_share_a_batch_and_not_their_caches() {
    let base = qwen3();
    let folders = [tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder")];
    let models = [adapted(&base, 2, 5, folders[0].path()), adapted(&base, 4, 9, folders[1].path())];
    let prompt = tokens(21, 3);
    let expected = [&base, &models[0], &models[1]].map(|model| recomputed(model, &prompt, 10));
    assert!(expected[0] != expected[1] && expected[1] != expected[2], "the adapters must matter");
    let base = Arc::new(base);
    for ring in [1, 3] {
        let options = EngineOptions {
            page_size: 4,
            kv_cache: KvCacheSize::Pages(100),
            max_model_len: Some(60),
            ..EngineOptions::default()
        };
        let engine = Engine::start(base.clone(), mesh(ring, 1), &options).expect("an engine");
        let client = engine.client();
        client.load_adapter("tales", folders[0].path()).expect("loaded");
        client.load_adapter("verses", folders[1].path()).expect("loaded");
        assert_eq!(client.adapters(), ["tales", "verses"]);
        let taken = client.load_adapter("tales", folders[1].path()).expect_err("the name is taken").to_string();
        assert!(taken.contains("'tales'"), "{taken}");
        // The second round finds what the first has left in the cache.
        for _ in 0..2 {
            let names = [None, Some("tales"), Some("verses")];
            let all = names.map(|name| client.submit(request(&prompt, name)).expect("taken"));
            assert_eq!(all.map(text), expected, "{ring} ranks");
        }
        let last = client.submit(request(&prompt, Some("tales"))).expect("taken");
        client.unload_adapter("tales").expect("unloaded");
        assert_eq!(text(last), expected[1], "requests in flight are finished first");
        let unknown = client.submit(request(&prompt, Some("tales"))).expect_err("unloaded").to_string();
        assert!(unknown.contains("'tales'") && unknown.contains("verses"), "{unknown}");
        // Other weights under the same name find nothing of the old ones.
        client.load_adapter("tales", folders[1].path()).expect("loaded again");
        assert_eq!(text(client.submit(request(&prompt, Some("tales"))).expect("taken")), expected[2]);
        engine.shutdown(true).expect("ended");
    }
}

/// Requests of two adapters and of the base model, with prompts of one and of several chunks, give the same on every mesh as each alone.
#[test]
fn adapters_of_one_step_are_joined_on_every_mesh() {
    for (name, model, pp, sizes) in [
        ("qwen3", qwen3 as fn() -> Model, 1, (1, 1, 1, 1)),
        ("qwen3", qwen3, 1, (2, 1, 2, 1)),
        ("qwen3", qwen3, 2, (2, 1, 1, 1)),
        ("wide", wide, 1, (2, 1, 1, 1)),
        ("gemma3", gemma3, 1, (1, 2, 1, 1)),
        ("qwen3_moe", qwen3_moe, 1, (1, 1, 1, 1)),
        ("qwen3_moe", qwen3_moe, 1, (2, 1, 2, 2)),
        ("qwen3_moe", qwen3_moe, 1, (3, 1, 1, 3)),
    ] {
        let base = model();
        let folders = [tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder")];
        let queries_only = Lora::new(3, 12.0, vec!["q_proj".to_owned()]).expect("a target");
        let all_layers = Lora::of_all_layers(4, 8.0).expect("sizes");
        let models = [
            &adapted_by(&base, all_layers, 5, folders[0].path()),
            &base,
            &adapted_by(&base, queries_only, 9, folders[1].path()),
        ];
        let prompts = [tokens(33, 3), tokens(7, 4)];
        let names = [Some("tales"), None, Some("queries")];
        let mut expected = Vec::new();
        for (model, adapter) in models.into_iter().zip(names) {
            expected.extend(prompts.iter().map(|prompt| (adapter, prompt, recomputed(model, prompt, 10))));
        }
        assert!((0..4).all(|at| expected[at].2 != expected[at + 2].2), "{name}: the adapters must matter");
        let engine = start_on(&Arc::new(base), staged(pp, sizes), &EngineOptions { prefill_chunk: 16, ..small() });
        for (name, folder) in ["tales", "queries"].into_iter().zip(&folders) {
            engine.client().load_adapter(name, folder.path()).expect("loaded");
        }
        for order in [[0, 1, 2, 3, 4, 5], [5, 2, 1, 0, 4, 3]] {
            let submit = |at: usize| {
                let (adapter, prompt, _) = &expected[at];
                engine.client().submit(request(prompt, *adapter)).expect("taken")
            };
            let all = order.map(|at| (at, submit(at)));
            for (at, events) in all {
                assert_eq!(text(events), expected[at].2, "{name} {sizes:?}: request {at}");
            }
        }
        // What is left shares steps without the adapter that is gone.
        engine.client().unload_adapter("tales").expect("unloaded");
        let left = [2, 3, 4, 5].map(|at| {
            let (adapter, prompt, _) = &expected[at];
            engine.client().submit(request(prompt, *adapter)).expect("taken")
        });
        for (events, (_, _, expected)) in left.into_iter().zip(&expected[2..]) {
            assert_eq!(&text(events), expected, "{name} {sizes:?}");
        }
    }
}

/// In bf16, with adapters of routers as well: each request gets what it gets alone.
#[test]
fn adapters_of_one_step_work_in_bf16() {
    let devices = Devices::open(DeviceName::Cpu, None).expect("the CPU").computing_in(Precision::Bf16);
    for (name, model) in [("wide", wide as fn() -> Model), ("qwen3_moe", qwen3_moe)] {
        let base = model();
        let folders = [tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder")];
        for (seed, folder) in folders.iter().enumerate() {
            let all = Lora::new(4, 8.0, vec!["all-linear".to_owned()]).expect("sizes");
            adapted_by(&base, all, 5 + seed as u64, folder.path());
        }
        let mesh = Mesh { devices: devices.clone(), ring: 2, ..Mesh::single() };
        let options = EngineOptions { prefix_cache: false, ..small() };
        let engine = start_on(&Arc::new(base.on(&devices).expect("rounded")), mesh, &options);
        engine.client().load_adapter("tales", folders[0].path()).expect("loaded");
        engine.client().load_adapter("verses", folders[1].path()).expect("loaded");
        let names = [Some("tales"), None, Some("verses"), Some("tales")];
        let ask = |at: usize| engine.client().submit(request(&tokens(9, at as u64), names[at])).expect("taken");
        let alone: Vec<_> = (0..4).map(|at| text(ask(at))).collect();
        let together: Vec<_> = (0..4).map(ask).collect();
        for (at, (events, alone)) in together.into_iter().zip(alone).enumerate() {
            let text = text(events);
            // Sums in another order may round to another neighbour in bf16, so that a later token differs.
            assert_eq!(text.len(), alone.len(), "{name}: request {at}");
            assert_eq!(text[..2], alone[..2], "{name}: request {at}");
        }
    }
}

/// A session knows adapters by their weights, not by their names.
#[test]
fn texts_of_an_adapter_are_restored_for_the_same_weights_only() {
    let (base, folders) = (qwen3(), [tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder")]);
    let models = [adapted(&base, 2, 5, folders[0].path()), adapted(&base, 2, 9, folders[1].path())];
    let (base, prompt, file) = (Arc::new(base), tokens(21, 3), folders[0].path().join("session"));
    let options = EngineOptions {
        page_size: 4,
        kv_cache: KvCacheSize::Pages(100),
        max_model_len: Some(60),
        ..EngineOptions::default()
    };
    let start = |ring| Engine::start(base.clone(), mesh(ring, 1), &options).expect("an engine");
    let first = start(3);
    first.client().load_adapter("unused", folders[1].path()).expect("loaded");
    first.client().load_adapter("tales", folders[0].path()).expect("loaded");
    text(first.client().submit(request(&prompt, Some("tales"))).expect("taken"));
    let saved = first.client().save_session(&file, "model").expect("saved");
    assert!(saved.tokens >= prompt.len());
    first.shutdown(true).expect("ended");
    for (own, restored) in [(0, saved.tokens), (1, 0)] {
        let engine = start(2);
        engine.client().load_adapter("stories", folders[own].path()).expect("loaded");
        let size = engine.client().restore_session(&file, "model").expect("restored");
        assert_eq!((size.tokens, size.left_out), (restored, saved.tokens - restored));
        let answer = text(engine.client().submit(request(&prompt, Some("stories"))).expect("taken"));
        assert_eq!(answer, recomputed(&models[own], &prompt, 10));
        let hits = engine.client().metrics().prefix_cache_hits;
        assert_eq!(hits > 0, restored > 0, "{hits} tokens were found");
        engine.shutdown(true).expect("ended");
    }
}

#[test]
fn an_adapter_that_does_not_fit_is_refused_and_the_engine_goes_on() {
    let (base, folder) = (Arc::new(qwen3()), tempfile::tempdir().expect("a folder"));
    adapted(&qwen3_moe(), 2, 5, folder.path());
    let options =
        EngineOptions { kv_cache: KvCacheSize::Pages(20), max_model_len: Some(60), ..EngineOptions::default() };
    let engine = Engine::start(base.clone(), mesh(2, 1), &options).expect("an engine");
    let client = engine.client();
    let missing = client.load_adapter("other", &folder.path().join("missing")).expect_err("unreadable").to_string();
    assert!(missing.contains("adapter_config.json"), "{missing}");
    let refused = client.load_adapter("other", folder.path()).expect_err("another model's").to_string();
    assert!(refused.contains("experts"), "{refused}");
    assert!(client.adapters().is_empty());
    let prompt = tokens(5, 1);
    assert_eq!(text(client.submit(request(&prompt, None)).expect("taken")), recomputed(&base, &prompt, 10));
}
