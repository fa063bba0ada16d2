//! Small random models, and a plain computation on one rank to compare with.
#![allow(dead_code, unreachable_pub, missing_docs)] // Each test file uses a part of it.

use candle_core::{Device, Tensor};
use ringspan::{Documents, Group, Layout, LayoutKind, StrategyKind};
use ringspan_candle::Context;
use ringspan_models::{Config, Decoder, ModelSource, folder};
use ringspan_serve::{Generation, Mesh, Model, Options, Result, Sampling, generate};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

pub const VOCABULARY: usize = 97;

/// The meshes (ring, ulysses) of the tests.
pub const MESHES: [(usize, usize); 7] = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 4)];

pub fn mesh(ring: usize, ulysses: usize) -> Mesh {
    Mesh { ring, ulysses, ..Mesh::single() }
}

/// A Qwen3 of two layers with 4 query and 2 key-value heads.
pub fn qwen3() -> Model {
    model(serde_json::json!({ "model_type": "qwen3" }))
}

/// A Mistral whose layers see `window` tokens back.
pub fn mistral(window: usize) -> Model {
    model(serde_json::json!({ "model_type": "mistral", "sliding_window": window }))
}

/// A Qwen3 with six experts in one of its layers, of which each token has two.
pub fn qwen3_moe() -> Model {
    model(serde_json::json!({
        "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "norm_topk_prob": true, "mlp_only_layers": [0]
    }))
}

/// A Gemma with a local and a global layer.
pub fn gemma3() -> Model {
    model(serde_json::json!({
        "model_type": "gemma3_text", "sliding_window": 7, "sliding_window_pattern": 2, "hidden_act": null,
        "query_pre_attn_scalar": 8
    }))
}

/// A Gemma with a local and a global layer, whose heads are as wide as two blocks of `q8_0`.
pub fn wide_heads() -> Model {
    model(serde_json::json!({
        "model_type": "gemma3_text", "sliding_window": 30, "sliding_window_pattern": 2, "hidden_act": null,
        "query_pre_attn_scalar": 64, "head_dim": 64
    }))
}

/// A Llama whose rotary embedding has another base for texts of more than `trained` tokens.
pub fn dynamic(trained: usize) -> Model {
    let rope = serde_json::json!({ "rope_type": "dynamic", "factor": 4.0 });
    model(serde_json::json!({ "model_type": "llama", "max_position_embeddings": trained, "rope_scaling": rope }))
}

/// A Qwen3 whose 40 million weights do not fit into a processor's cache.
pub fn large() -> Model {
    model(serde_json::json!({
        "model_type": "qwen3", "vocab_size": 16000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64
    }))
}

/// A Qwen3 with layers so wide that ranks share them when they decode.
pub fn wide() -> Model {
    wide_of("qwen3")
}

/// Like [`wide`], of another family of its configuration.
pub fn wide_of(family: &str) -> Model {
    model(serde_json::json!({
        "model_type": family, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 64
    }))
}

/// A Llama with matrices of Q4_0 so wide that ranks share them when they decode.
pub fn wide_in_q4_0() -> Model {
    let json = serde_json::json!({
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 4096, "tie_word_embeddings": false, "hidden_act": "silu"
    });
    let parameters = weights_of(&decoder_of(&json));
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("wide.gguf");
    ringspan_testing::gguf::write_llama_q4_0(&path, &json, parameters.into_iter());
    let (config, _, weights) = ModelSource::at(&path).and_then(ModelSource::load_stored).expect("a model");
    Model::new(Decoder::new(config).expect("supported"), weights).expect("an embedding")
}

/// The tiny model of a family, from the fixtures that are compared with Hugging Face.
pub fn of_fixture(name: &str) -> Model {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ringspan-models/tests/fixtures");
    let (config, weights) = folder::load(&fixtures.join(name)).expect("the fixture");
    Model::new(Decoder::new(config).expect("supported"), weights).expect("an embedding")
}

fn model(more: serde_json::Value) -> Model {
    let mut config = serde_json::json!({
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 4096, "tie_word_embeddings": false, "hidden_act": "silu"
    });
    if let (Some(config), Some(more)) = (config.as_object_mut(), more.as_object()) {
        config.extend(more.clone());
    }
    let decoder = decoder_of(&config);
    let weights = weights_of(&decoder);
    Model::new(decoder, weights).expect("a whole model")
}

fn decoder_of(config: &serde_json::Value) -> Decoder {
    let config: Config = serde_json::from_value(config.clone()).expect("a known model");
    Decoder::new(config).expect("sizes that fit")
}

/// Random weights; biases are not zero.
fn weights_of(decoder: &Decoder) -> BTreeMap<String, Tensor> {
    let mut weights = decoder.init(5).expect("weights");
    // Newly initialised models hardly react to their input; with these larger weights they do.
    for (name, weight) in &mut weights {
        if name.ends_with("bias") {
            let numbers =
                tokens(weight.elem_count(), 7).into_iter().map(|token| token as f32 / VOCABULARY as f32 - 0.5);
            *weight = Tensor::from_iter(numbers, &Device::Cpu).expect("as many");
        } else if ["proj", "lm_head", "mlp.gate."].iter().any(|part| name.contains(part)) {
            *weight = weight.affine(6.0, 0.0).expect("scaled");
        }
    }
    weights
}

/// Pseudo-random tokens.
pub fn tokens(n: usize, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % VOCABULARY as u32
    };
    (0..n).map(|_| next()).collect()
}

pub fn options(max_tokens: usize) -> Options {
    Options { sampling: Sampling::greedy(), max_tokens, stop_tokens: Vec::new() }
}

/// Generates on a mesh; returns one result for each rank.
pub fn run(model: &Model, (ring, ulysses): (usize, usize), prompt: &[u32], options: &Options) -> Vec<Generation> {
    generate(model, &mesh(ring, ulysses), prompt, options, |_| Ok(ControlFlow::Continue(()))).expect("generation")
}

/// Logits `[T, V]` of all tokens, computed by one rank without a cache.
pub fn logits(model: &Model, tokens: &[u32]) -> Vec<Vec<f32>> {
    logits_of_text(model, tokens, tokens.len())
}

/// Like [`logits`], for the first tokens of a text that will have `length` tokens.
fn logits_of_text(model: &Model, tokens: &[u32], length: usize) -> Vec<Vec<f32>> {
    let work = |group: Arc<Group>| -> Result<Vec<Vec<f32>>> {
        let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(1, tokens.len()), 1)?;
        let context = Context::new(group, Arc::new(layout), StrategyKind::Ring)?.with_max_length(length);
        let hidden = model.decoder().norm(model.weights(0), &model.hidden(0, tokens, &context)?)?;
        Ok(model.decoder().model().head().logits(&hidden, model.weights(0))?.to_vec2()?)
    };
    Mesh::single().run(work).expect("one rank").remove(0)
}

/// Greedy generation that computes the whole text anew for each token, with rotary angles for its final length.
pub fn recomputed(model: &Model, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut all = prompt.to_vec();
    for _ in 0..n {
        // The last generated token never passes through the model.
        let last = logits_of_text(model, &all, prompt.len() + n - 1).pop().expect("a prompt");
        let best = (0..last.len()).fold(0, |best, token| if last[token] > last[best] { token } else { best });
        all.push(best as u32);
    }
    all.split_off(prompt.len())
}

/// ‖a - b‖ / ‖b‖
pub fn relative_l2(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let size: f64 = b.iter().map(|b| f64::from(*b).powi(2)).sum();
    (difference / size.max(f64::MIN_POSITIVE)).sqrt()
}
