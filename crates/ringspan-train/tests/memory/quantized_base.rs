//! Tests of the memory that plans predict for adapters beside a base in a GGUF file, which stays as it is stored.

use crate::plan::{Run, config, saved, take_what_is_predicted_of};
use ringspan_models::folder;
use ringspan_testing::gguf::write_llama_q4_0;
use ringspan_train::Settings;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Writes the model of a configuration to a GGUF file, its matrices in blocks of 4 bits, and returns the file's path.
fn in_four_bits(root: &Path, json: &Value) -> PathBuf {
    let dense = saved(root, json);
    let path = dense.with_extension("gguf");
    write_llama_q4_0(&path, json, folder::load(&dense).unwrap().1.into_iter());
    path
}

#[test]
fn a_run_beside_a_base_in_four_bits_takes_what_its_plan_predicts() {
    let s = || Settings { lora_rank: Some(16), lora_targets: Some("all-linear".into()), ..Settings::default() };
    let deep = config((4, 512, 16, 8, 1536, 512, false), None);
    let runs: [Run; 2] = [
        ("4 bits", deep.clone(), (1, 512), s()),
        ("4 bits, activations in bf16", deep, (1, 1024), Settings { activations: Some("bf16".into()), ..s() }),
    ];
    take_what_is_predicted_of(runs, in_four_bits);
}
