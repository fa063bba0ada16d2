//! `--device` of the commands that compute models: what they refuse, and on a GPU (or one made of a CPU,
//! `tools/check_cuda.sh`) the numbers of the CPU.

mod support;

use ringspan_models::{Config, Decoder, folder};
use std::path::Path;
use support::Bench;

/// A folder `model` with random weights and byte-level tokens, and a text.
fn bench(more: &serde_json::Value) -> Bench {
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

fn run(bench: &Bench, command: &str, flags: &str) -> std::process::Output {
    bench.command(command).args(flags.split_whitespace()).output().expect("the binary runs")
}

/// What a command that must fail says.
#[track_caller]
fn refusal(bench: &Bench, command: &str, flags: &str) -> String {
    let output = run(bench, command, flags);
    assert!(!output.status.success(), "{command} {flags} was taken");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_device_that_is_not_one_is_refused_with_those_that_are() {
    let bench = bench(&serde_json::json!({}));
    for (command, flags) in [
        ("generate", "--model model --prompt x --device gpu"),
        ("score", "--model model --text text.txt --out out.safetensors --device gpu"),
        ("train", "--data text.txt --device gpu --dry-run"),
        ("verify", "--tiny --device gpu"),
    ] {
        let said = refusal(&bench, command, flags);
        assert!(said.contains("unknown device 'gpu'") && said.contains("cuda:N"), "{command}: {said}");
    }
}

#[test]
fn the_plan_of_a_training_on_gpus_says_what_its_memory_is_not() {
    let bench = bench(&serde_json::json!({}));
    let plan = |flags: &str| {
        let all = format!("--model model --data text.txt --sequence-length 32 --dry-run {flags}");
        String::from_utf8(run(&bench, "train", &all).stdout).expect("text")
    };
    let (cpu, gpu) = (plan(""), plan("--device cuda:1"));
    assert!(gpu.contains("on cuda:1") && gpu.contains("memory is not asked"), "{gpu}");
    assert!(cpu.contains("memory ") && !cpu.contains("cuda") && !cpu.contains("not asked"), "{cpu}");
}

#[cfg(not(feature = "candle-cuda"))]
#[test]
fn a_build_without_gpus_for_models_says_how_to_make_one_with_them() {
    let bench = bench(&serde_json::json!({}));
    for (command, flags) in [
        ("generate", "--model model --prompt x --device cuda"),
        ("score", "--model model --text text.txt --out out.safetensors --device cuda:0"),
        ("train", "--model model --data text.txt --sequence-length 32 --steps 1 --device cuda"),
        ("verify", "--tiny --device cuda"),
    ] {
        let said = refusal(&bench, command, flags);
        assert!(said.contains("--features candle-cuda"), "{command}: {said}");
    }
}

#[cfg(feature = "candle-cuda")]
mod with_gpus {
    use super::*;
    use ringspan_candle::Devices;
    use ringspan_serve::{BLOCK, Mesh, Model, Options, Sampling, generate};
    use std::ops::ControlFlow;
    use support::read;

    #[track_caller]
    fn succeed(bench: &Bench, command: &str, flags: &str) -> String {
        let output = run(bench, command, flags);
        assert!(output.status.success(), "{command} {flags}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    fn no_gpu() -> bool {
        let none = ringspan::kernel::Gpu::count() == Ok(0);
        if none {
            println!("skipped: no GPU on this machine");
        }
        none
    }

    #[test]
    fn a_gpu_that_is_not_there_is_refused() {
        let said = refusal(&bench(&serde_json::json!({})), "generate", "--model model --prompt x --device cuda:99");
        assert!(said.contains("GPU 99: open: there are"), "{said}");
    }

    #[test]
    fn a_text_and_its_scores_are_those_of_the_cpu() {
        if no_gpu() {
            return;
        }
        for more in [
            serde_json::json!({}),
            serde_json::json!({
                "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                "norm_topk_prob": true, "mlp_only_layers": [0]
            }),
        ] {
            let bench = bench(&more);
            let generate = "--model model --prompt hello --max-tokens 6 --temperature 0";
            let wanted = succeed(&bench, "generate", generate);
            assert!(!wanted.is_empty());
            for mesh in ["", "--ring 2"] {
                assert_eq!(succeed(&bench, "generate", &format!("{generate} --device cuda {mesh}")), wanted, "{mesh}");
            }
            let text = &std::fs::read_to_string(bench.path("text.txt")).expect("text")[..90];
            std::fs::write(bench.path("short.txt"), text).expect("file");
            let score = "--model model --text short.txt --out out.safetensors --logits";
            succeed(&bench, "score", score);
            let wanted = read(&bench.path("out.safetensors"));
            for mesh in ["", "--ring 2"] {
                succeed(&bench, "score", &format!("{score} --device cuda:0 {mesh}"));
                let got = read(&bench.path("out.safetensors"));
                for name in ["logprobs", "logits"] {
                    let (got, wanted) = (got[name].values(), wanted[name].values());
                    let norm: f32 = wanted.iter().map(|x| x * x).sum();
                    let off: f32 = got.iter().zip(&wanted).map(|(a, b)| (a - b).powi(2)).sum();
                    assert!(off.sqrt() <= 1e-5 * norm.sqrt(), "{mesh}: {name} differs by {:e}", (off / norm).sqrt());
                }
            }
        }
    }

    /// Of heads of any width the same is copied: tokens and lists, and nothing of the cache.
    #[test]
    fn a_new_token_copies_nothing_of_the_cache() {
        if no_gpu() {
            return;
        }
        let devices = Devices::open("cuda:0".parse().expect("a device"), None).expect("a GPU that works");
        let options = Options { sampling: Sampling::greedy(), max_tokens: 6, stop_tokens: Vec::new() };
        // A prompt that ends a block, so that with two ranks the new tokens are the second one's.
        let prompt: Vec<u32> = (0..BLOCK as u32).map(|i| i * 7 % 257).collect();
        for ring in [1, 2] {
            let copied = [8, 32].map(|head_dim| {
                let bench = bench(&serde_json::json!({ "head_dim": head_dim }));
                let (config, weights) = folder::load(&bench.path("model")).expect("what was saved");
                let decoder = Decoder::new(config).expect("a known model");
                let model = Model::new(decoder, weights).and_then(|model| model.on(&devices)).expect("a model");
                let mesh = Mesh { ring, devices: devices.clone(), ..Mesh::single() };
                let gpu = devices.of(0).kernel(1).expect("a stream").gpu().expect("a GPU").clone();
                let before = gpu.copied();
                let all =
                    generate(&model, &mesh, &prompt, &options, |_| Ok(ControlFlow::Continue(()))).expect("a text");
                assert!(all.iter().all(|generation| generation.tokens.len() == 6));
                assert_eq!(all.iter().map(|generation| generation.cached).sum::<usize>(), prompt.len() + 5);
                let after = gpu.copied();
                (after.0 - before.0, after.1 - before.1)
            });
            assert_eq!(copied, [(copied[0].0, 0); 2], "{ring} ranks: bytes copied to the GPU and from it");
        }
    }

    /// Loss, logits, gradients and updated weights, against one rank on the CPU.
    #[test]
    fn a_step_on_a_mesh_of_a_gpu_is_that_of_one_rank_of_the_cpu() {
        if no_gpu() {
            return;
        }
        let bench = bench(&serde_json::json!({}));
        for mesh in [
            "--ring 1",
            "--ring 2 --recompute nothing",
            "--ring 2 --ulysses 2",
            "--dp-shard 2 --tp 2",
            "--ring 2 --ep 2",
            "--ring 2 --ep 2 --lora-rank 4 --lora-dropout 0.2",
        ] {
            let said = succeed(&bench, "verify", &format!("--tiny --sequence-length 24 --device cuda {mesh}"));
            assert!(said.contains("PASS") && said.contains("on cuda"), "{said}");
        }
    }

    #[test]
    fn losses_of_a_training_are_those_of_the_cpu() {
        if no_gpu() {
            return;
        }
        let bench = bench(&serde_json::json!({}));
        let losses = |out: &str, flags: &str| -> Vec<f64> {
            let of_all = "--model model --data text.txt --sequence-length 32 --steps 3 --lr 1e-3 --sample-tokens 0";
            succeed(&bench, "train", &format!("{of_all} --out {out} --eval-tokens 64 {flags}"));
            let lines = std::fs::read_to_string(bench.path(out).join("metrics.jsonl")).expect("metrics");
            let value = |line: &str| serde_json::from_str::<serde_json::Value>(line).expect("JSON");
            lines
                .lines()
                .flat_map(|line| ["loss", "held_out_loss"].map(|key| value(line)[key].as_f64()))
                .flatten()
                .collect()
        };
        for (number, (wanted, flags)) in [
            ("--ring 1", "--ring 1"),
            ("--ring 1", "--ring 2"),
            ("--ring 1 --lora-rank 2 --lora-dropout 0.2", "--ring 2 --lora-rank 2 --lora-dropout 0.2"),
        ]
        .into_iter()
        .enumerate()
        {
            let wanted = losses(&format!("cpu-{number}"), wanted);
            let got = losses(&format!("gpu-{number}"), &format!("{flags} --device cuda"));
            assert_eq!((got.len(), wanted.len()), (4, 4), "three steps and a look at the held-out text");
            for (got, wanted) in got.iter().zip(&wanted) {
                assert!((got - wanted).abs() <= 1e-5 * wanted.abs(), "{flags}: {got} and not {wanted}");
            }
        }
    }
}
