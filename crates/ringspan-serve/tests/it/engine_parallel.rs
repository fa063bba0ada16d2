//! Tests of the engine with tensor, expert and pipeline parallelism: each request gets the events that one rank would send.

use super::engine::{ask, close, collect, greedy, most_likely, seeded_of, small};
use super::engine_adapters::adapted;
use crate::support::*;
use ringspan_models::{Decoder, ModelSource};
use ringspan_serve::engine::request::{EngineClient, FinishReason, Request};
use ringspan_serve::engine::{Engine, EngineOptions, KvCacheSize};
use ringspan_serve::{Mesh, Model};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A mesh of (ring, ulysses, tp, ep).
pub(super) type Sizes = (usize, usize, usize, usize);

const ONE: Sizes = (1, 1, 1, 1);

pub(super) fn of_sizes((ring, ulysses, tp, ep): Sizes) -> Mesh {
    Mesh { ring, ulysses, tp, ep, deadline: Duration::from_secs(60), ..Mesh::single() }
}

/// Like [`of_sizes`], with pipeline stages.
pub(super) fn staged(pp: usize, sizes: Sizes) -> Mesh {
    Mesh { pp, ..of_sizes(sizes) }
}

fn start(model: &Arc<Model>, sizes: Sizes, options: &EngineOptions) -> Engine {
    start_on(model, of_sizes(sizes), options)
}

pub(super) fn start_on(model: &Arc<Model>, mesh: Mesh, options: &EngineOptions) -> Engine {
    Engine::start(model.clone(), mesh.clone(), options).unwrap_or_else(|error| panic!("{mesh}: {error}"))
}

/// Texts and log-probabilities, of prompts as well, cold and from the cache, while other prompts are read in chunks.
pub(super) fn serves_as_one_rank(name: &str, model: &Arc<Model>, meshes: impl IntoIterator<Item = Mesh>) {
    let vocabulary = model.vocabulary() as u32;
    let of_seed = |n, seed| tokens(n, seed).into_iter().map(|token| token % vocabulary).collect::<Vec<u32>>();
    let (prompt, other) = (of_seed(23, 5), of_seed(47, 9));
    let read = |text: &[u32]| Request { prompt_logprobs: Some(2), ..greedy(text, 1) };
    // Rotary embeddings that depend on a length are made for that of the longest sequence.
    let options = EngineOptions { max_model_len: Some(80), ..small() };
    let one = start(model, ONE, &options);
    let expected = (ask(&one, greedy(&prompt, 20)), ask(&one, seeded_of(&prompt, 20)), ask(&one, read(&other)));
    for mesh in meshes {
        let engine = start_on(model, mesh.clone(), &options);
        for round in 0..2 {
            let client = engine.client();
            let requests = [greedy(&prompt, 20), greedy(&other, 9), seeded_of(&prompt, 20), most_likely(&prompt, 20)];
            let [greedy, concurrent, seeded, most_likely] =
                requests.map(|request| client.submit(request).expect("taken"));
            let (greedy, seeded, read) = (collect(greedy), collect(seeded), ask(&engine, read(&other)));
            collect(concurrent);
            assert_eq!(collect(most_likely).tokens, expected.0.tokens, "{name}, {mesh}, round {round}");
            assert_eq!(greedy.tokens, expected.0.tokens, "{name}, {mesh}, round {round}");
            assert_eq!(seeded.tokens, expected.1.tokens, "{name}, {mesh}, round {round}");
            close(&greedy.logprobs, &expected.0.logprobs);
            close(&seeded.logprobs, &expected.1.logprobs);
            let prompts =
                [&read, &expected.2].map(|answer| answer.prompt.iter().flatten().cloned().collect::<Vec<_>>());
            assert_eq!(prompts[0].len(), other.len() - 1);
            close(&prompts[0], &prompts[1]);
            assert!(round == 0 || greedy.cached > 0, "{name}, {mesh}: nothing was found in the cache");
        }
        engine.shutdown(true).expect("ended");
    }
}

/// Sinks, windows, latent attention, norms over the heads of all ranks, stacked matrices, factors of logits.
#[test]
fn layers_whose_width_ranks_share_serve_as_on_one_rank() {
    let meshes = [(1, 1, 2, 1), (2, 1, 2, 1), (1, 2, 2, 1), (3, 1, 2, 1)].map(of_sizes);
    serves_as_one_rank("gemma3", &Arc::new(gemma3()), [(1, 1, 2, 1), (1, 1, 4, 1), (2, 1, 2, 1)].map(of_sizes));
    for name in ["llama", "gemma2", "granite", "olmo2", "phi3", "deepseek_v2", "deepseek_v3", "gpt_oss"] {
        let some = meshes.iter().take(if name == "llama" { 4 } else { 2 });
        serves_as_one_rank(name, &Arc::new(of_fixture(name)), some.cloned());
    }
}

#[test]
fn experts_that_ranks_share_serve_as_on_one_rank() {
    let meshes = [(2, 1, 1, 2), (1, 1, 2, 2), (1, 1, 2, 1), (2, 1, 2, 2), (2, 1, 2, 4), (4, 1, 1, 2), (3, 1, 1, 3)];
    serves_as_one_rank("qwen3_moe", &Arc::new(qwen3_moe()), meshes.map(of_sizes));
    for name in ["mixtral", "deepseek_v3", "gpt_oss"] {
        serves_as_one_rank(name, &Arc::new(of_fixture(name)), [(2, 1, 1, 2), (2, 1, 2, 2)].map(of_sizes));
    }
}

/// Pipeline stages together with context, tensor and expert parallelism; with tied and untied heads.
#[test]
fn stages_that_share_the_layers_serve_as_one_rank() {
    let meshes = [(2, ONE), (2, (2, 1, 1, 1)), (2, (3, 1, 1, 1)), (2, (1, 2, 1, 1)), (2, (2, 1, 2, 1))];
    for (name, model) in [("qwen3", qwen3()), ("gemma3", gemma3()), ("llama_tied", of_fixture("llama_tied"))] {
        serves_as_one_rank(name, &Arc::new(model), meshes.map(|(pp, sizes)| staged(pp, sizes)));
    }
    // The last has two copies of the experts in each stage.
    let sparse = [(2, (2, 1, 1, 2)), (2, (2, 1, 2, 2)), (2, (4, 1, 1, 2))].map(|(pp, sizes)| staged(pp, sizes));
    serves_as_one_rank("qwen3_moe", &Arc::new(qwen3_moe()), sparse);
}

/// Layers that context-parallel ranks share when they decode: dense, with biases, and quantized; cut by tensor parallelism as well.
#[test]
fn layers_that_decoding_ranks_share_serve_as_on_one_rank() {
    let meshes = [(2, 1, 1, 1), (1, 2, 1, 1), (2, 1, 2, 1), (2, 2, 1, 1)].map(of_sizes);
    for (name, model) in
        [("qwen3", wide()), ("qwen2", wide_of("qwen2")), ("phi3", wide_of("phi3")), ("llama, q4_0", wide_in_q4_0())]
    {
        let meshes = meshes.iter().cloned().chain([staged(2, (2, 1, 1, 1))]);
        serves_as_one_rank(name, &Arc::new(model), meshes);
    }
}

#[test]
fn long_texts_are_equal_with_tensor_expert_and_pipeline_parallelism() {
    let tp = [(1, 1, 2, 1), (2, 1, 2, 1), (1, 1, 4, 1)].map(of_sizes);
    let ep = [(2, 1, 1, 2), (1, 1, 2, 2)].map(of_sizes);
    let pp = [staged(2, ONE), staged(2, (2, 1, 1, 1))];
    for (model, meshes) in [(qwen3(), [&tp[..], &pp].concat()), (qwen3_moe(), ep.to_vec())] {
        let model = Arc::new(model);
        let prompt = tokens(37, 3);
        let one = start(&model, ONE, &small());
        let requests: [fn(&[u32], usize) -> Request; 2] = [greedy, seeded_of];
        let expected = requests.map(|request| ask(&one, request(&prompt, 256)));
        for mesh in meshes {
            let engine = start_on(&model, mesh.clone(), &small());
            for (request, expected) in requests.iter().zip(&expected) {
                let answer = ask(&engine, request(&prompt, 256));
                assert_eq!((&answer.tokens, answer.end), (&expected.tokens, Some(FinishReason::Length)), "{mesh}");
                close(&answer.logprobs, &expected.logprobs);
            }
        }
    }
}

/// Ranks cut rows and, between blocks, columns of matrices that stay as they are stored.
#[test]
fn quantized_weights_are_cut_as_they_are_stored() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ringspan-models/tests/fixtures/gguf");
    for name in ["qwen3.gguf", "llama_tied.gguf"] {
        let (config, _, weights) =
            ModelSource::at(&fixtures.join(name)).and_then(ModelSource::load_stored).expect(name);
        let model = Arc::new(Model::new(Decoder::new(config).expect("supported"), weights).expect("an embedding"));
        serves_as_one_rank(name, &model, [of_sizes((1, 1, 2, 1)), of_sizes((2, 1, 2, 1)), staged(2, (1, 1, 2, 1))]);
    }
}

#[test]
fn adapters_are_cut_as_their_layers_are() {
    for (model, pp, sizes) in [
        (qwen3 as fn() -> Model, 1, (1, 1, 2, 1)),
        (qwen3, 1, (2, 1, 2, 1)),
        (qwen3, 2, (2, 1, 1, 1)),
        (wide, 1, (2, 1, 1, 1)),
        (qwen3_moe, 1, (2, 1, 2, 2)),
    ] {
        let (base, folder, prompt) = (model(), tempfile::tempdir().expect("a folder"), tokens(21, 3));
        let expected = recomputed(&adapted(&base, 2, 5, folder.path()), &prompt, 10);
        let without = recomputed(&base, &prompt, 10);
        assert_ne!(expected, without, "the adapter must matter");
        let engine = start_on(&Arc::new(base), staged(pp, sizes), &small());
        engine.client().load_adapter("tales", folder.path()).expect("loaded");
        let with = || Request { adapter: Some("tales".into()), ..greedy(&prompt, 10) };
        for _ in 0..2 {
            assert_eq!(ask(&engine, with()).tokens, expected, "{sizes:?}");
            assert_eq!(ask(&engine, greedy(&prompt, 10)).tokens, without, "{sizes:?}");
        }
        engine.client().unload_adapter("tales").expect("unloaded");
        assert!(engine.client().submit(with()).is_err());
    }
}

/// Each rank has the pages of its part of the sequence, and in them its part of the heads.
#[test]
fn the_cache_is_shared_by_tokens_and_heads() {
    let model = Arc::new(qwen3());
    let limits = |sizes, kv_cache| {
        let options = EngineOptions { kv_cache, max_model_len: None, ..small() };
        start(&model, sizes, &options).client().limits()
    };
    let (one, bytes) = (limits(ONE, KvCacheSize::Pages(8)), KvCacheSize::Bytes(1 << 16));
    assert_eq!((one.ranks, one.cp, one.max_model_len), (1, 1, 32));
    let both = limits((2, 1, 2, 1), KvCacheSize::Pages(8));
    assert_eq!((both.ranks, both.cp, both.max_model_len), (4, 2, 64));
    // Half of the heads in as many bytes are twice as many pages; ranks beyond the number of key-value heads have one each.
    let pages = [ONE, (1, 1, 2, 1), (1, 1, 4, 1)].map(|sizes| limits(sizes, bytes).pages_per_rank);
    assert_eq!([pages[1], pages[2]], [2 * pages[0]; 2]);
    let stages = start_on(&model, staged(2, ONE), &EngineOptions { kv_cache: bytes, ..small() }).client().limits();
    assert_eq!((stages.ranks, stages.pp, stages.pages_per_rank), (2, 2, 2 * pages[0]));
    let engine = start(&model, (2, 1, 2, 1), &small());
    let answer = ask(&engine, greedy(&tokens(5, 1), 1));
    assert_eq!(answer.tokens.len(), 1);
    engine.client().check_health().expect("healthy");
    // The first page of the prompt stays in the cache of the first two ranks, which have it for different heads.
    let cached: Vec<usize> = engine.client().metrics().ranks.iter().map(|rank| rank.pages_cached).collect();
    assert_eq!(cached.len(), 4);
    assert!(cached[0] == cached[1] && cached[2] == cached[3] && cached[0] > 0, "{cached:?}");
}

#[test]
fn meshes_that_do_not_fit_the_model_are_refused_with_the_numbers() {
    let refusal =
        |model: Model, sizes| Engine::start(model, of_sizes(sizes), &small()).expect_err("refused").to_string();
    let heads = refusal(qwen3(), (1, 1, 5, 1));
    assert!(heads.contains("5 ranks cannot share 4 query heads over 2 key-value heads"), "{heads}");
    let none = refusal(qwen3(), (2, 1, 1, 2));
    assert_eq!(none, "ep 2 shares experts, and qwen3 has none; leave it out");
    let undivided = refusal(qwen3_moe(), (3, 1, 2, 4));
    assert!(
        undivided.contains("ep 4 does not divide the 6 ranks of a stage (ring 3 x ulysses 1 x tp 2)"),
        "{undivided}"
    );
    let many = refusal(qwen3_moe(), (8, 1, 1, 8));
    assert!(many.contains("ep 8 leaves ranks without one of the 6 experts"), "{many}");
    let few = refusal(qwen3(), (1, 4, 2, 1));
    assert!(few.contains("ulysses 4 distributes heads over 4 ranks, but tp 2 leaves 2 of the 4 query heads"), "{few}");
    let layers = Engine::start(qwen3(), staged(3, ONE), &small()).expect_err("refused").to_string();
    assert_eq!(layers, "pp 3 leaves stages without one of the 2 layers");
    let zero = refusal(qwen3(), (1, 1, 0, 1));
    assert!(zero.contains("tp 0") && zero.contains("at least 1"), "{zero}");
    let run = of_sizes((1, 1, 2, 1)).run(|_| Ok(())).expect_err("only the engine shares layers").to_string();
    assert!(run.contains("tp 2, ep 1, pp 1"), "{run}");
}
