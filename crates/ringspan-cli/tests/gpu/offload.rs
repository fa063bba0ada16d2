//! `--offload-activations`: what it refuses, and on a GPU (or one emulated on a CPU, `tools/check_cuda.sh`) the same bits as a
//! run without it.

use crate::support::model::{bench, refusal, run};

#[test]
fn what_would_offload_nothing_is_refused() {
    let bench = bench(&serde_json::json!({}));
    let train = "--model model --data text.txt --sequence-length 32 --dry-run --offload-activations";
    for (command, flags) in [("train", train), ("verify", "--tiny --offload-activations")] {
        let said = refusal(&bench, command, flags);
        assert!(said.contains("--offload-activations has no effect with --device cpu"), "{command}: {said}");
    }
    let said = refusal(&bench, "train", &format!("{train} --device cuda"));
    assert!(said.contains("--offload-activations has no effect: the model has 2 layers"), "{said}");
    assert!(run(&bench, "train", &format!("{train} false")).status.success(), "what is done anyway may be said");
}

#[cfg(feature = "candle-cuda")]
mod with_gpus {
    use super::*;
    use crate::support::Bench;
    use crate::support::model::{no_gpu, succeed};

    /// Compares losses and the weights after three steps, for steps of equal length and of different lengths.
    #[test]
    fn a_training_has_the_bits_of_one_that_keeps_all_on_the_gpu() {
        if no_gpu() {
            return;
        }
        let sparse = serde_json::json!({
            "model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 6, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "norm_topk_prob": true, "mlp_only_layers": [0]
        });
        let dense = serde_json::json!({ "num_hidden_layers": 5 });
        for (more, flags) in [
            (&dense, "--ring 1 --grad-accumulation 2"),
            (&dense, "--ring 2 --dtype bf16 --recompute nothing"),
            (&dense, "--ring 1 --recompute full --activations bf16"),
            (&dense, "--ring 1 --tp 2 --recompute nothing"),
            (&sparse, "--ring 2 --recompute nothing"),
            (&dense, "--ring 2 --lora-rank 2 --lora-merge"),
        ] {
            let bench = bench(more);
            let results = |out: &str, more: &str| {
                let of_all = "--model model --data text.txt --sequence-length 40 --steps 3 --lr 1e-3 --sample-tokens 0 \
                              --held-out 0 --device cuda";
                succeed(&bench, "train", &format!("{of_all} --out {out} {flags} {more}"));
                let lines = std::fs::read_to_string(bench.path(out).join("metrics.jsonl")).expect("metrics");
                let values = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
                let losses: Vec<f64> = values.filter_map(|line| line["loss"].as_f64()).collect();
                assert_eq!(losses.len(), 3);
                let weights = std::fs::read(bench.path(out).join("model.safetensors")).expect("the model");
                (losses, weights)
            };
            let (there, away) = (results("there", ""), results("away", "--offload-activations"));
            assert_eq!(there.0, away.0, "{flags}: losses");
            assert!(there.1 == away.1, "{flags}: other weights");
        }
    }

    #[test]
    fn a_step_is_that_of_one_rank_of_the_cpu() {
        if no_gpu() {
            return;
        }
        let bench = Bench::new(&[]);
        for mesh in ["--ring 2", "--ring 2 --ep 2 --recompute nothing", "--ulysses 2 --dtype bf16"] {
            let flags = format!("--tiny --sequence-length 23 --device cuda --offload-activations {mesh}");
            let said = succeed(&bench, "verify", &flags);
            assert!(said.contains("PASS"), "{mesh}: {said}");
        }
    }
}
