//! `attend --device`: what it refuses, and on a GPU (or one emulated on a CPU, `tools/check_cuda.sh`) the same numbers as on
//! the CPU.

use crate::support::{Bench, Sizes};
use std::process::Output;

fn bench() -> Bench {
    Bench::new(&Sizes { b: 2, sq: 33, sk: 33, h: 6, g: 3, d: 8, dv: 4 }.tensors())
}

/// Runs `attend` without `--threads`, which a GPU refuses.
fn attend(bench: &Bench, flags: &str) -> Output {
    let files = ["in.safetensors", "--out", "out.safetensors"];
    bench.command("attend").args(files).args(flags.split_whitespace()).output().expect("runs")
}

#[track_caller]
fn refuses(bench: &Bench, flags: &str, words: &[&str]) {
    let output = attend(bench, flags);
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{flags} was taken");
    for word in words {
        assert!(message.contains(word), "{flags}: '{word}' is missing: {message}");
    }
}

#[test]
fn a_device_that_is_not_one_is_refused_with_those_that_are() {
    refuses(&bench(), "--device gpu", &["unknown device 'gpu'", "cuda:N"]);
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_gpus_says_how_to_make_one_with_them() {
    refuses(&bench(), "--device cuda", &["built without GPUs", "--features cuda"]);
}

#[cfg(feature = "cuda")]
mod with_gpus {
    use super::*;
    use ringspan_cuda::Gpu;

    #[test]
    fn flags_that_a_gpu_cannot_follow_are_refused() {
        let bench = bench();
        refuses(&bench, "--device cuda --threads 2", &["--threads are those of the CPU"]);
        if Gpu::count() == Ok(0) {
            // There is no driver, or a driver that finds no GPU.
            refuses(&bench, "--device cuda", &["GPU 0: open:", "driver"]);
            return;
        }
        refuses(&bench, "--device cuda:99", &["GPU 99: open: there are", "numbered from 0"]);
        refuses(&bench, "--device cuda --ring 2 --strategy auto", &["--rank-speed"]);
    }

    #[test]
    fn a_mesh_on_one_gpu_has_the_numbers_of_the_cpu() {
        if Gpu::count() == Ok(0) {
            println!("skipped: no GPU on this machine");
            return;
        }
        let bench = bench();
        let wanted = bench.results("--mask causal --backward");
        for mesh in ["--ring 1", "--ring 3", "--ulysses 2", "--ring 2 --ulysses 3", "--ring 4 --strategy pass-q"] {
            let output = attend(&bench, &format!("--mask causal --backward --device cuda {mesh}"));
            assert!(output.status.success(), "{mesh}: {}", String::from_utf8_lossy(&output.stderr));
            let got = crate::support::read(&bench.path("out.safetensors"));
            for name in ["out", "lse", "dq", "dk", "dv"] {
                let (got, wanted) = (got[name].values(), wanted[name].values());
                let norm: f32 = wanted.iter().map(|x| x * x).sum();
                let off: f32 = got.iter().zip(&wanted).map(|(a, b)| (a - b).powi(2)).sum();
                assert!(off.sqrt() <= 1e-5 * norm.sqrt(), "{mesh}: {name} differs by {:e}", (off / norm).sqrt());
            }
        }
    }
}

/// Tests with a process for each rank, which also need MPI.
#[cfg(all(feature = "mpi", feature = "nccl"))]
mod between_processes {
    use super::*;
    use ringspan_cuda::{Gpu, nccl};
    use std::process::Command;

    /// Rank 0's note on how blocks travel, and the distance of its results from the CPU's.
    fn attend(ranks: usize, mesh: &str) -> (String, f32) {
        let bench = bench();
        let wanted = bench.results("--mask causal --backward");
        let mut command = Command::new("mpirun");
        command.args(["--oversubscribe", "--allow-run-as-root", "-n", &ranks.to_string(), "-wdir"]).arg(bench.path(""));
        command.arg(env!("CARGO_BIN_EXE_ringspan")).args(["attend", "in.safetensors", "--out", "out.safetensors"]);
        let flags = format!("--mask causal --backward --device cuda --report report.json {mesh}");
        let output = command.args(flags.split_whitespace()).output().expect("mpirun is installed");
        assert!(output.status.success(), "{mesh}: {}", String::from_utf8_lossy(&output.stderr));
        let got = crate::support::read(&bench.path("out.safetensors"));
        let off = |name: &str| {
            let (got, wanted) = (got[name].values(), wanted[name].values());
            let norm: f32 = wanted.iter().map(|x| x * x).sum();
            let off: f32 = got.iter().zip(&wanted).map(|(a, b)| (a - b).powi(2)).sum();
            (off / norm).sqrt()
        };
        let off = ["out", "lse", "dq", "dk", "dv"].map(off).into_iter().fold(0.0, f32::max);
        let report = std::fs::read_to_string(bench.path("report.json")).expect("a report");
        let report: serde_json::Value = serde_json::from_str(&report).expect("a report in JSON");
        (report["run"]["blocks"].as_str().expect("how blocks went").to_owned(), off)
    }

    #[test]
    fn blocks_go_by_nccl_where_each_rank_has_a_gpu() {
        if Gpu::count() != Ok(2) || nccl::version().is_err() {
            println!("skipped: no NCCL, or not two GPUs on this machine");
            return;
        }
        for mesh in ["--ring 2", "--ulysses 2"] {
            let (way, off) = attend(2, mesh);
            assert!(way.starts_with("blocks by NCCL 2.") && off <= 1e-5, "{mesh}: {way}, off by {off:e}");
        }
        let (way, off) = attend(3, "--ring 3");
        let words = "through the memory of the CPU (no NCCL: ranks 0 and 2 share a GPU";
        assert!(way.contains(words) && off <= 1e-5, "{way}, off by {off:e}");
    }
}
