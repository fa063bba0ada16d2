//! Commands that compute in bf16 on CPUs give the results of f32, up to rounding.

use crate::support::bf16::{self, ROUNDED, off};
use crate::support::model::{bench, refusal, succeed};
use crate::support::{Tensor, read, write};
use ringspan_candle::Devices;

#[test]
fn scores_are_those_of_f32_up_to_rounding() {
    bf16::scores_are_those_of_f32_up_to_rounding("");
}

#[test]
fn a_text_is_one_that_f32_may_draw_and_its_cache_takes_half() {
    bf16::a_text_is_one_that_f32_may_draw_and_its_cache_takes_half(&Devices::CPU);
}

/// Compares loss, logits, gradients and updated weights with those of one rank in f32.
#[test]
fn verify_passes_on_meshes() {
    let bench = bench(&serde_json::json!({}));
    for mesh in [
        "--ring 1",
        "--ring 2 --ulysses 2",
        "--dp-shard 2 --tp 2",
        "--ring 2 --ep 2",
        "--ring 2 --ep 2 --lora-rank 4 --lora-dropout 0.2",
    ] {
        let said = succeed(&bench, "verify", &format!("--tiny --sequence-length 24 --dtype bf16 {mesh}"));
        assert!(said.contains("PASS") && said.contains("in bf16 (the one rank computes in f32)"), "{said}");
        println!("{mesh}: {}", said.lines().last().unwrap_or_default());
    }
}

/// The matrices of a GGUF file stay as they are stored, and are multiplied with activations in bf16.
#[test]
fn quantized_matrices_go_with_activations_in_bf16() {
    let bench = bench(&serde_json::json!({}));
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../ringspan-models/tests/fixtures/gguf_families/qwen3.gguf");
    let tokens: Vec<i64> = (0..40).map(|i| i * i * 31 % 96).collect();
    write(&bench.path("tokens.safetensors"), &[("tokens", Tensor::i64(&[2, 20], &tokens))]);
    let score = format!("--model {model} --tokens tokens.safetensors --out out.safetensors --logits");
    succeed(&bench, "score", &score);
    let wanted = read(&bench.path("out.safetensors"));
    for mesh in ["", "--ring 2"] {
        succeed(&bench, "score", &format!("{score} --dtype bf16 {mesh}"));
        let off = off(&read(&bench.path("out.safetensors"))["logits"].values(), &wanted["logits"].values());
        assert!(off > 5e-4 && off <= 2.0 * ROUNDED, "{mesh}: logits differ by {off:e}");
    }
}

#[test]
fn what_has_no_effect_in_bf16_is_refused() {
    let bench = bench(&serde_json::json!({}));
    let train = "--model model --data text.txt --sequence-length 32 --steps 1 --dtype bf16";
    let said = refusal(&bench, "train", &format!("{train} --activations bf16"));
    assert!(said.contains("--activations has no effect with --dtype bf16"), "{said}");
    let said = refusal(&bench, "train", &train.replace("bf16", "f16"));
    assert!(said.contains("'f16'") && said.contains("f32, bf16"), "{said}");
    let plan = succeed(&bench, "train", &format!("{train} --dry-run"));
    assert!(plan.contains("in bf16"), "{plan}");
}
