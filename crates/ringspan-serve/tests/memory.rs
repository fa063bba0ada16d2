//! Peak memory of reading a mixture of experts and of generating with it, counted by the allocator.

use candle_core::{DType, Tensor};
use ringspan_models::{Config, Decoder, folder};
use ringspan_serve::{Mesh, Model, Options, Sampling, generate};
use ringspan_testing::CountingAllocator;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// Saves a model in bf16 with random weights.
fn saved(json: &Value, to: &Path) {
    let decoder = Decoder::new(serde_json::from_value::<Config>(json.clone()).unwrap()).unwrap();
    let rounded = |(name, tensor): (String, Tensor)| (name, tensor.to_dtype(DType::BF16).unwrap());
    let weights: HashMap<String, Tensor> = decoder.init(3).unwrap().into_iter().map(rounded).collect();
    candle_core::safetensors::save(&weights, to.join("model.safetensors")).unwrap();
    std::fs::write(to.join("config.json"), json.to_string()).unwrap();
}

/// This is the only test of its program: a process has one allocator, and tests would run at the same time.
#[test]
fn a_mixture_in_bf16_is_read_and_generates_without_its_experts_in_f32() {
    let of_all = json!({
        "vocab_size": 97, "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": false,
    });
    let apart = json!({
        "model_type": "qwen3_moe", "intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 512, "norm_topk_prob": true, "mlp_only_layers": [], "decoder_sparse_step": 1,
    });
    let stacked = json!({
        "model_type": "gpt_oss", "intermediate_size": 512, "num_local_experts": 16, "num_experts_per_tok": 4,
        "sliding_window": 16,
    });
    for own in [apart, stacked] {
        let mut json = of_all.clone();
        json.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        let out = tempfile::tempdir().unwrap();
        saved(&json, out.path());
        let prompt: Vec<u32> = (0..40).map(|i| i * i * 31 % 97).collect();
        let options = Options { sampling: Sampling::greedy(), max_tokens: 3, stop_tokens: Vec::new() };

        let before = ALLOCATOR.allocated();
        ALLOCATOR.reset_peak();
        let (config, weights) = folder::load_stored(out.path()).unwrap();
        let (stored, wide) = weights.values().fold((0, 0), |(stored, wide), weight| {
            (stored + weight.bytes(), wide + 4 * weight.dims().iter().product::<usize>())
        });
        let model = Model::new(Decoder::new(config).unwrap(), weights).unwrap();
        let held = ALLOCATOR.allocated() - before;
        let go_on = |_| Ok(ControlFlow::Continue(()));
        let generated = generate(&model, &Mesh::single(), &prompt, &options, go_on).unwrap();
        assert_eq!(generated[0].tokens.len(), 3);
        let most = ALLOCATOR.peak() - before;

        let what =
            format!("{}: {stored} bytes are stored, {wide} in f32, {held} held, {most} at most", json["model_type"]);
        println!("{what}");
        // Norms and biases are f32.
        assert!(wide > 50_000_000 && stored < wide * 51 / 100, "{what}");
        assert!(held < stored + stored / 50, "{what}");
        // The peak has room for one expert's matrix in f32 and what products pack, but not for a layer's experts.
        assert!(most < stored + wide / 6, "{what}");
    }
}
