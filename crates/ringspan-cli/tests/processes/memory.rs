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

/// Saves a Llama in blocks of 4 bits, `base.gguf`, and a sequence of tokens, `tokens.safetensors`.
fn prepare(folder: &Path, tokens: usize) {
    let config = json!({
        "model_type": "llama", "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu",
    });
    let decoder =
        Decoder::new(serde_json::from_value::<Config>(config.clone()).expect("a configuration")).expect("a model");
    let parameters = decoder.init(3).expect("random weights");
    write_llama_q4_0(&folder.join("base.gguf"), &config, parameters.into_iter());
    let bytes: Vec<u8> = (0..tokens).flat_map(|i| (i as u32 * 7 % 251).to_le_bytes()).collect();
    let view = TensorView::new(Dtype::U32, vec![1, tokens], &bytes).expect("tokens");
    safetensors::serialize_to_file([("tokens", view)], None, &folder.join("tokens.safetensors")).expect("room");
}

#[test]
fn a_rank_of_a_ring_beside_a_base_in_four_bits_takes_what_its_plan_predicts() {
    let folder = tempfile::tempdir().expect("a folder");
    prepare(folder.path(), 4096);
    for (ranks, activations) in [("2", "f32"), ("4", "bf16")] {
        let arguments = [
            "train",
            "--model",
            "base.gguf",
            "--tokens",
            "tokens.safetensors",
            "--lora-rank",
            "16",
            "--lora-targets",
            "all-linear",
            "--ring",
            ranks,
            "--threads",
            "1",
            "--steps",
            "2",
            "--activations",
            activations,
            "--out",
            ranks,
        ];
        let run = mpi::mpirun(&[(ranks.parse().expect("a number"), folder.path(), arguments.to_vec())]);
        assert!(run.good, "{:#?}", run.stderr);
        let [predicted, allocated] = ["predicted", "allocated"].map(|word| megabytes(&run.stdout[0], word));
        let of_plan = allocated / predicted;
        assert!((0.9..1.1).contains(&of_plan), "{ranks} ranks: {allocated} MB of {predicted} planned");
    }
}
