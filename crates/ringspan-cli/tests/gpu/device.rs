//! `--device` of the commands that compute models: what it refuses, and on a GPU (or one emulated on a CPU,
//! `tools/check_cuda.sh`) the same numbers as on the CPU.

use crate::support::model::{bench, refusal, run};
#[cfg(feature = "candle-cuda")]
use ringspan_models::{Decoder, folder};

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

/// A type that is unknown or would have no effect is refused before any device is opened.
#[test]
fn a_type_in_which_models_do_not_compute_is_refused_with_those_in_which_they_do() {
    let bench = bench(&serde_json::json!({}));
    for (command, flags) in [
        ("generate", "--model model --prompt x"),
        ("score", "--model model --text text.txt --out out.safetensors"),
        ("train", "--model model --data text.txt --sequence-length 32 --dry-run"),
        ("verify", "--tiny"),
    ] {
        let said = refusal(&bench, command, &format!("{flags} --dtype f16 --device cuda"));
        assert!(said.contains("'f16'") && said.contains("f32, bf16"), "{command}: {said}");
    }
    let flags = "--model model --data text.txt --dry-run --device cuda --dtype bf16 --activations f32";
    let said = refusal(&bench, "train", flags);
    assert!(said.contains("--activations has no effect with --dtype bf16"), "{said}");
    // A flag may name the default.
    assert!(run(&bench, "generate", "--model model --prompt x --max-tokens 1 --dtype f32").status.success());
}

#[test]
fn the_plan_of_a_training_on_gpus_says_what_is_on_the_cpu_and_what_on_a_gpu() {
    let bench = bench(&serde_json::json!({}));
    let plan = |flags: &str| {
        let all = format!("--model model --data text.txt --sequence-length 32 --dry-run {flags}");
        String::from_utf8(run(&bench, "train", &all).stdout).expect("text")
    };
    // A plan does not need the GPU to exist; it says what it does not know about it.
    let (cpu, gpu) = (plan(""), plan("--device cuda:99"));
    for part in
        ["on cuda:99 in f32", "a rank of the CPU's", "a rank of a GPU's", "how much a GPU has is not known here: "]
    {
        assert!(gpu.contains(part), "{part}: {gpu}");
    }
    assert!(plan("--device cuda --dtype bf16").contains("on cuda in bf16"), "the plan says what is computed in");
    assert!(cpu.contains("memory ") && !cpu.contains("cuda") && !cpu.contains("GPU"), "{cpu}");
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
    use crate::support::bf16::{self, models, off};
    use crate::support::model::{no_gpu, succeed};
    use crate::support::read;
    use ringspan_candle::{Devices, Precision};
    use ringspan_serve::{BLOCK, Mesh, Model, Options, Sampling, generate};
    use std::ops::ControlFlow;

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
        for more in models() {
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
                    let off = off(&got[name].values(), &wanted[name].values());
                    assert!(off <= 1e-5, "{mesh}: {name} differs by {off:e}");
                }
            }
        }
    }

    #[test]
    fn scores_in_bf16_are_those_of_the_cpu_up_to_rounding() {
        if !no_gpu() {
            bf16::scores_are_those_of_f32_up_to_rounding("--device cuda:0");
        }
    }

    #[test]
    fn a_text_in_bf16_is_one_that_f32_may_draw_and_its_cache_takes_half() {
        if !no_gpu() {
            let devices = Devices::open("cuda:0".parse().expect("a device"), None).expect("a GPU that works");
            bf16::a_text_is_one_that_f32_may_draw_and_its_cache_takes_half(&devices);
        }
    }

    /// The bytes copied to the GPU do not depend on the width of heads: they are tokens and lists, and nothing of the cache.
    #[test]
    fn a_new_token_copies_nothing_of_the_cache() {
        if no_gpu() {
            return;
        }
        let options = Options { sampling: Sampling::greedy(), max_tokens: 6, stop_tokens: Vec::new() };
        // The prompt fills a block, so that with two ranks the second one owns the new tokens.
        let prompt: Vec<u32> = (0..BLOCK as u32).map(|i| i * 7 % 257).collect();
        for (ring, precision) in [(1, Precision::F32), (2, Precision::F32), (2, Precision::Bf16)] {
            let devices = Devices::open("cuda:0".parse().expect("a device"), None).expect("a GPU that works");
            let devices = devices.computing_in(precision);
            let copied = [8, 32].map(|head_dim| {
                let bench = bench(&serde_json::json!({ "head_dim": head_dim }));
                let (config, weights) = folder::load(&bench.path("model")).expect("what was saved");
                let decoder = Decoder::new(config).expect("a known model");
                let model = Model::new(decoder, weights).and_then(|model| model.on(&devices)).expect("a model");
                let mesh = Mesh { ring, devices: devices.clone(), ..Mesh::single() };
                let kernel = devices.of(0).kernel(1).expect("a stream");
                let gpu = ringspan_cuda::Gpu::of(&kernel).expect("a GPU").clone();
                let before = gpu.copied();
                let all =
                    generate(&model, &mesh, &prompt, &options, |_| Ok(ControlFlow::Continue(()))).expect("a text");
                assert!(all.iter().all(|generation| generation.tokens.len() == 6));
                assert_eq!(all.iter().map(|generation| generation.cached).sum::<usize>(), prompt.len() + 5);
                let after = gpu.copied();
                (after.0 - before.0, after.1 - before.1)
            });
            assert_eq!(copied, [(copied[0].0, 0); 2], "{ring} ranks in {precision}: bytes copied to and from the GPU");
        }
    }

    /// Compares loss, logits, gradients and updated weights with those of one rank on the CPU.
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
            "--ring 1 --dtype bf16",
            "--ring 2 --recompute nothing --dtype bf16",
            "--dp-shard 2 --tp 2 --dtype bf16",
            "--ring 2 --ep 2 --dtype bf16",
            "--ring 2 --ep 2 --lora-rank 4 --lora-dropout 0.2 --dtype bf16",
        ] {
            let said = succeed(&bench, "verify", &format!("--tiny --sequence-length 24 --device cuda {mesh}"));
            assert!(said.contains("PASS") && said.contains("on cuda"), "{said}");
            println!("{mesh}: {}", said.lines().last().unwrap_or_default());
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
            let shares = lines.lines().filter_map(|line| value(line)["peak_share"].as_f64());
            let shares: Vec<f64> = shares.collect();
            assert!(shares.len() == 3 && shares.iter().all(|share| *share > 0.0), "{shares:?} of the peak");
            lines
                .lines()
                .flat_map(|line| ["loss", "held_out_loss"].map(|key| value(line)[key].as_f64()))
                .flatten()
                .collect()
        };
        for (number, (wanted, flags, bound)) in [
            ("--ring 1", "--ring 1", 1e-5),
            ("--ring 1", "--ring 2", 1e-5),
            ("--ring 1 --lora-rank 2 --lora-dropout 0.2", "--ring 2 --lora-rank 2 --lora-dropout 0.2", 1e-5),
            // A loss is a mean over tokens, in which most roundings cancel out.
            ("--ring 1", "--ring 2 --dtype bf16", 1e-3),
            ("--ring 1 --lora-rank 2 --lora-dropout 0.2", "--lora-rank 2 --lora-dropout 0.2 --dtype bf16", 1e-3),
        ]
        .into_iter()
        .enumerate()
        {
            let wanted = losses(&format!("cpu-{number}"), wanted);
            let got = losses(&format!("gpu-{number}"), &format!("{flags} --device cuda"));
            assert_eq!((got.len(), wanted.len()), (4, 4), "three steps and a look at the held-out text");
            for (got, wanted) in got.iter().zip(&wanted) {
                assert!((got - wanted).abs() <= bound * wanted.abs(), "{flags}: {got} and not {wanted}");
            }
        }
    }
}

/// Tests with a process for each rank, which also need MPI.
#[cfg(all(feature = "candle-cuda", feature = "mpi", feature = "nccl"))]
mod between_processes {
    use super::*;
    use crate::support::bf16::off;
    use crate::support::{Bench, read};
    use ringspan_cuda::{Gpu, nccl};
    use std::process::{Command, Output};

    /// Whether there are two GPUs and NCCL.
    fn is_there() -> bool {
        let there = Gpu::count() == Ok(2) && nccl::version().is_ok();
        if !there {
            println!("skipped: no NCCL, or not two GPUs on this machine");
        }
        there
    }

    /// The text that the processes wrote to standard output, and to standard error.
    #[track_caller]
    fn mpirun(bench: &Bench, ranks: usize, command: &str, flags: &str) -> (String, String) {
        let mut mpirun = Command::new("mpirun");
        mpirun.args(["--timeout", "240", "--oversubscribe", "--allow-run-as-root", "-n", &ranks.to_string(), "-wdir"]);
        mpirun.arg(bench.path("")).arg(env!("CARGO_BIN_EXE_ringspan")).arg(command).args(flags.split_whitespace());
        let Output { status, stdout, stderr } = mpirun.output().expect("mpirun is installed");
        let [stdout, stderr] = [stdout, stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
        assert!(status.success(), "{command} {flags}: {stderr}");
        (stdout, stderr)
    }

    const BY_NCCL: &str = "blocks by NCCL 2.";

    #[test]
    fn a_step_has_the_numbers_of_one_rank_of_the_cpu() {
        if !is_there() {
            return;
        }
        let bench = bench(&serde_json::json!({}));
        for mesh in ["--tp 2 --dtype bf16", "--ring 2 --ep 2"] {
            let flags = format!("--tiny --sequence-length 24 --threads 1 --device cuda {mesh}");
            let (stdout, stderr) = mpirun(&bench, 2, "verify", &flags);
            assert!(stdout.contains("PASS"), "{mesh}: {stdout}");
            assert!(stderr.contains(BY_NCCL), "{mesh}: {stderr}");
            println!("{mesh}: {}", stdout.lines().last().unwrap_or_default());
        }
    }

    #[test]
    fn texts_scores_and_losses_are_those_of_the_cpu() {
        if !is_there() {
            return;
        }
        let bench = bench(&serde_json::json!({}));
        let alone = |command: &str, flags: &str| {
            let output = run(&bench, command, flags);
            assert!(output.status.success(), "{command} {flags}: {}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let both = |command: &str, flags: &str| {
            let (stdout, stderr) = mpirun(&bench, 2, command, &format!("{flags} --threads 1 --device cuda --ring 2"));
            assert!(stderr.contains(BY_NCCL), "{command}: {stderr}");
            stdout
        };
        let generate = "--model model --prompt hello --max-tokens 4 --temperature 0";
        // mpirun may give processes a terminal, to which a line break is written after the text.
        assert_eq!(both("generate", generate).trim_end(), alone("generate", generate).trim_end());

        // A third rank has to share a GPU, which NCCL refuses.
        let (text, said) = mpirun(&bench, 3, "generate", &format!("{generate} --threads 1 --device cuda --ring 3"));
        assert!(said.contains("through the memory of the CPU (no NCCL: ranks 0 and 2 share a GPU"), "{said}");
        assert_eq!(text.trim_end(), alone("generate", generate).trim_end());

        let text = &std::fs::read_to_string(bench.path("text.txt")).expect("text")[..90];
        std::fs::write(bench.path("short.txt"), text).expect("file");
        let score = |out: &str| format!("--model model --text short.txt --out {out}");
        alone("score", &score("cpu.safetensors"));
        both("score", &score("gpu.safetensors"));
        let [got, wanted] =
            ["gpu", "cpu"].map(|out| read(&bench.path(&format!("{out}.safetensors")))["logprobs"].values());
        let off = off(&got, &wanted);
        assert!(off <= 1e-5, "log-probabilities differ by {off:e}");

        let train = |out: &str| {
            let of_all = "--model model --data text.txt --sequence-length 32 --steps 2 --lr 1e-3 --sample-tokens 0";
            format!("{of_all} --eval-tokens 64 --out {out}")
        };
        alone("train", &train("cpu"));
        both("train", &train("gpu"));
        let [got, wanted] = ["gpu", "cpu"].map(|out| {
            let lines = std::fs::read_to_string(bench.path(out).join("metrics.jsonl")).expect("metrics");
            let values = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
            values.filter_map(|line| line["loss"].as_f64()).collect::<Vec<_>>()
        });
        assert_eq!((got.len(), wanted.len()), (2, 2), "two steps");
        for (got, wanted) in got.iter().zip(&wanted) {
            assert!((got - wanted).abs() <= 1e-5 * wanted.abs(), "a loss of {got} and not {wanted}");
        }
    }
}
