//! Tests of the memory of one rank, which is a process of its own here: threads can only be measured together, and
//! their memory does not peak at the same time. Needs feature `mpi`.
#![cfg(feature = "mpi")]

use crate::mpi;
use crate::support::megabytes;
use ringspan_models::{Config, Decoder};
use ringspan_testing::gguf::write_llama_q4_0;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;
use std::path::Path;

/// Saves a Llama in blocks of 4 bits as `base.gguf`.
fn save_base(folder: &Path) {
    let config = json!({
        "model_type": "llama", "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu",
    });
    let decoder =
        Decoder::new(serde_json::from_value::<Config>(config.clone()).expect("a configuration")).expect("a model");
    let parameters = decoder.init(3).expect("random weights");
    write_llama_q4_0(&folder.join("base.gguf"), &config, parameters.into_iter());
}

/// Saves the configuration of a model with latent attention, experts and shared experts as `config.json`.
fn save_latent_config(folder: &Path) {
    let config = json!({
        "model_type": "deepseek_v3", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 768,
        "num_hidden_layers": 4, "num_attention_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 1,
        "moe_intermediate_size": 256, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2,
        "n_group": 2, "topk_group": 1, "hidden_act": "silu",
    });
    std::fs::write(folder.join("config.json"), config.to_string()).expect("room");
}

/// Saves a sequence of tokens as `tokens.safetensors`.
fn save_tokens(folder: &Path, tokens: usize) {
    let bytes: Vec<u8> = (0..tokens).flat_map(|i| (i as u32 * 7 % 251).to_le_bytes()).collect();
    let view = TensorView::new(Dtype::U32, vec![1, tokens], &bytes).expect("tokens");
    safetensors::serialize_to_file([("tokens", view)], None, &folder.join("tokens.safetensors")).expect("room");
}

/// Trains in two steps on `ranks` processes, and compares what the first of them allocates with its plan.
fn takes_what_is_planned(folder: &Path, ranks: usize, arguments: &[&str]) {
    let common = ["train", "--tokens", "tokens.safetensors", "--threads", "1", "--steps", "2", "--out", "out"];
    let arguments = [&common, arguments].concat();
    let run = mpi::mpirun(&[(ranks, folder, arguments.clone())]);
    assert!(run.good, "{:#?}", run.stderr);
    std::fs::remove_dir_all(folder.join("out")).expect("a folder of the run");
    let [predicted, allocated] = ["predicted", "allocated"].map(|word| megabytes(&run.stdout[0], word));
    let of_plan = allocated / predicted;
    assert!((0.9..1.1).contains(&of_plan), "{arguments:?}: {allocated} MB of {predicted} planned");
}

#[test]
fn a_rank_of_a_ring_beside_a_base_in_four_bits_takes_what_its_plan_predicts() {
    let folder = tempfile::tempdir().expect("a folder");
    save_base(folder.path());
    save_tokens(folder.path(), 4096);
    let adapters = ["--model", "base.gguf", "--lora-rank", "16", "--lora-targets", "all-linear"];
    for (ranks, ring, activations) in [(2, "2", "f32"), (4, "4", "bf16")] {
        let arguments = [&adapters[..], &["--ring", ring, "--activations", activations]].concat();
        takes_what_is_planned(folder.path(), ranks, &arguments);
    }
}

#[test]
fn a_rank_of_latent_attention_over_all_axes_takes_what_its_plan_predicts() {
    let folder = tempfile::tempdir().expect("a folder");
    save_latent_config(folder.path());
    save_tokens(folder.path(), 2048);
    let arguments = ["--model-config", "config.json", "--ring", "2", "--tp", "2", "--ep", "2"];
    takes_what_is_planned(folder.path(), 4, &arguments);
}
