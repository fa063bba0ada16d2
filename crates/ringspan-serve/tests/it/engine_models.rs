//! The engine with models of every family, with weights as files store them, and in bf16.

use super::engine::{ask, close, greedy, small, start};
use crate::support::*;
use ringspan_candle::{ActivationDType, DeviceName, Devices, Precision};
use ringspan_models::{Decoder, ModelSource};
use ringspan_serve::engine::request::EngineClient;
use ringspan_serve::engine::{Engine, EngineOptions};
use ringspan_serve::{Mesh, Model};
use std::path::Path;
use std::sync::Arc;

const EVERY_ACTIVATION_DTYPE: [ActivationDType; 2] = [ActivationDType::F32, ActivationDType::Int16];

/// Models with integers in several formats; gpt-oss has experts in MXFP4.
const WITH_CODES: [&str; 2] = ["gguf_families/qwen3.gguf", "gguf_families/gpt-oss.gguf"];

/// Sinks, latent attention, factors and caps on logits, layers without positions, partial rotary embeddings.
#[test]
fn every_family_serves_as_it_reads() {
    for name in
        ["granite", "mixtral", "gemma2", "olmo2", "smollm3", "glm4", "phi3", "phi3_longrope", "deepseek_v2", "gpt_oss"]
    {
        let model = Arc::new(of_fixture(name));
        // Rotary embeddings that depend on a length are made for that of the longest sequence.
        let options = EngineOptions { max_model_len: Some(36), ..small() };
        // A model that repeats one token would hide a wrong position.
        let of_prompt = |seed| {
            let prompt: Vec<u32> = tokens(23, seed).into_iter().map(|token| token % 96).collect();
            let expected = recomputed(&model, &prompt, 14);
            let several = expected.iter().collect::<std::collections::BTreeSet<_>>().len() > 1;
            several.then_some((prompt, expected))
        };
        let (prompt, expected) = (5..40).find_map(of_prompt).expect("a prompt that several tokens follow");
        for ring in [1, 3] {
            let engine = start(&model, ring, &options);
            // The second time, the prompt is in the cache.
            for _ in 0..2 {
                assert_eq!(ask(&engine, greedy(&prompt, 14)).tokens, expected[..13], "{name}, {ring} ranks");
            }
        }
    }
}

/// A quantized model, whose products round activations to `activations`.
fn quantized(name: &str, activations: ActivationDType) -> Arc<Model> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ringspan-models/tests/fixtures");
    let (config, _, weights) = ModelSource::at(&fixtures.join(name)).and_then(ModelSource::load_stored).expect(name);
    let model = Model::new(Decoder::new(config).expect("supported"), weights).expect("an embedding");
    Arc::new(model.on(&Devices::CPU.rounding_activations(activations)).expect("weights on the CPU"))
}

/// Each rank has a share of the output head's rows, quantized or not.
#[test]
fn quantized_weights_serve_alike_on_every_mesh() {
    let dense = ["gguf/qwen3.gguf", "gguf/llama_tied.gguf"].map(|name| (name, ActivationDType::F32));
    let of_type = |dtype| WITH_CODES.map(|name| (name, dtype));
    for (name, activations) in EVERY_ACTIVATION_DTYPE.into_iter().flat_map(of_type).chain(dense) {
        let model = quantized(name, activations);
        let options = EngineOptions { max_model_len: Some(40), ..small() };
        let vocabulary = model.vocabulary() as u32;
        let prompt: Vec<u32> = tokens(19, 7).into_iter().map(|token| token % vocabulary).collect();
        let expected = ask(&start(&model, 1, &options), greedy(&prompt, 12));
        assert_eq!(expected.tokens, recomputed(&model, &prompt, 12), "{name}");
        for ring in [1, 2, 3] {
            let engine = start(&model, ring, &options);
            // The second time, the prompt is in the cache, and another request may be decoded in the same steps.
            for other in [None, Some(7)] {
                let beside =
                    other.map(|tokens| engine.client().submit(greedy(&prompt[..tokens], 12)).expect("accepted"));
                let answer = ask(&engine, greedy(&prompt, 12));
                assert_eq!(answer.tokens, expected.tokens, "{name}, activations in {activations}, {ring} ranks");
                close(&answer.logprobs, &expected.logprobs);
                drop(beside);
            }
        }
    }
}

/// Log-probabilities stay near those of activations in f32.
#[test]
fn rounded_activations_change_log_probabilities_a_little() {
    for name in WITH_CODES {
        let [exact, rounded] = EVERY_ACTIVATION_DTYPE.map(|dtype| {
            let model = quantized(name, dtype);
            let prompt: Vec<u32> = tokens(19, 7).into_iter().map(|token| token % model.vocabulary() as u32).collect();
            ask(&start(&model, 1, &EngineOptions { max_model_len: Some(40), ..small() }), greedy(&prompt, 12))
        });
        let differences: Vec<f32> =
            exact.logprobs.iter().zip(&rounded.logprobs).map(|(a, b)| (a.logprob - b.logprob).abs()).collect();
        assert_eq!(exact.tokens, rounded.tokens, "{name}");
        assert!(differences.iter().any(|x| *x > 0.0), "{name}: activations were not rounded");
        assert!(differences.iter().all(|x| *x < 3e-4), "{name}: {differences:?}");
    }
}

#[test]
fn a_model_in_bf16_serves_what_it_does_in_f32_up_to_rounding() {
    let devices = Devices::open(DeviceName::Cpu, None).expect("the CPU").computing_in(Precision::Bf16);
    let (wide, narrow) = (Arc::new(gemma3()), Arc::new(gemma3().on(&devices).expect("rounded")));
    let prompt = tokens(23, 5);
    let expected = ask(&start(&wide, 1, &small()), greedy(&prompt, 1));
    for ring in [1, 3] {
        let mesh = Mesh { devices: devices.clone(), ..mesh(ring, 1) };
        let engine = Engine::start(narrow.clone(), mesh, &small()).expect("an engine");
        for _ in 0..2 {
            let answer = ask(&engine, greedy(&prompt, 1));
            let (got, exact) = (answer.logprobs[0].top[0], expected.logprobs[0].top[0]);
            assert!(got.0 == exact.0 && (got.1 - exact.1).abs() < 0.1, "{got:?} for {exact:?}, {ring} ranks");
        }
    }
}
