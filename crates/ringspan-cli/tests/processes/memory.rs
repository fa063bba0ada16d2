//! Tests of the memory of one rank, which is a process of its own here: threads can only be measured together, and
//! their memory does not peak at the same time. Needs feature `mpi`.
#![cfg(feature = "mpi")]

use crate::mpi;
use crate::support::megabytes;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;
use std::path::Path;

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
fn a_rank_of_latent_attention_over_all_axes_takes_what_its_plan_predicts() {
    let folder = tempfile::tempdir().expect("a folder");
    save_latent_config(folder.path());
    save_tokens(folder.path(), 2048);
    let arguments = ["--model-config", "config.json", "--ring", "2", "--tp", "2", "--ep", "2"];
    takes_what_is_planned(folder.path(), 4, &arguments);
}
