//! A small model with random weights, a text for it, and ways to run commands on them.

use super::Bench;
use ringspan_models::{Config, Decoder, folder};
use std::path::Path;

/// A folder `model` with random weights and byte-level tokens, and a text file.
pub fn bench(more: &serde_json::Value) -> Bench {
    let bench = Bench::new(&[]);
    let mut config = serde_json::json!({
        "model_type": "qwen3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 4096, "tie_word_embeddings": true, "hidden_act": "silu"
    });
    config.as_object_mut().expect("keys").extend(more.as_object().cloned().unwrap_or_default());
    let parsed: Config = serde_json::from_value(config.clone()).expect("a known model");
    let weights = Decoder::new(parsed).and_then(|decoder| decoder.init(3)).expect("weights");
    let model = bench.path("model");
    folder::save(&model, &config, &weights).expect("saved");
    let tokenizer = ringspan_train::Tokenizer::byte_level(Path::new("byte-level")).expect("tokenizer");
    std::fs::write(model.join("tokenizer.json"), tokenizer.to_json().expect("JSON")).expect("file");
    let text: String = (0..400).map(|i| format!("line {} of {}\n", i * 7919 % 1009, i % 13)).collect();
    std::fs::write(bench.path("text.txt"), text).expect("file");
    bench
}

pub fn run(bench: &Bench, command: &str, flags: &str) -> std::process::Output {
    bench.command(command).args(flags.split_whitespace()).output().expect("the binary runs")
}

/// The output of a command that must fail.
#[track_caller]
pub fn refusal(bench: &Bench, command: &str, flags: &str) -> String {
    let output = run(bench, command, flags);
    assert!(!output.status.success(), "{command} {flags} was taken");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The output of a command that must succeed.
#[track_caller]
pub fn succeed(bench: &Bench, command: &str, flags: &str) -> String {
    let output = run(bench, command, flags);
    assert!(output.status.success(), "{command} {flags}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Whether there is no GPU; prints a note if so.
#[cfg(feature = "candle-cuda")]
pub fn no_gpu() -> bool {
    let none = ringspan_cuda::Gpu::count() == Ok(0);
    if none {
        println!("skipped: no GPU on this machine");
    }
    none
}
