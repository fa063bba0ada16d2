//! Ctrl-C while checkpoints are saved at every step: the run ends with exit code 130, and can be resumed.
#![cfg(unix)]

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn ctrl_c_during_saves_leaves_a_checkpoint_to_go_on_from() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("text.txt"), "the quick brown fox jumps over the lazy dog. ".repeat(400))
        .expect("room for a text");
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringspan"));
        command.current_dir(folder.path()).arg("train").args(arguments);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        command
    };
    let start = ["--data", "text.txt", "--sequence-length", "128", "--steps", "100000", "--save-every", "1"];
    let mut training = run(&start).arg("--out").arg("out").stderr(Stdio::null()).spawn().expect("the binary starts");
    let checkpoints = || -> Vec<String> {
        let entries = std::fs::read_dir(folder.path().join("out/checkpoints")).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    let began = Instant::now();
    while !checkpoints().iter().any(|name| name.as_str() > "step-000003") {
        assert!(began.elapsed() < Duration::from_secs(120), "no checkpoint after {:?}", began.elapsed());
        std::thread::sleep(Duration::from_millis(3));
    }
    let killed = Command::new("kill").args(["-INT", &training.id().to_string()]).status().expect("kill runs");
    assert!(killed.success());
    assert_eq!(training.wait().expect("it ends").code(), Some(130));

    let left = checkpoints();
    assert!(left.iter().all(|name| name.starts_with("step-") && name.len() == "step-000001".len()), "{left:?}");
    let last: u64 =
        left.iter().filter_map(|name| name.strip_prefix("step-")?.parse().ok()).max().expect("a checkpoint");
    let more = (last + 1).to_string();
    let resumed = run(&["--resume", "out", "--steps", &more]).output().expect("the binary starts");
    let said = String::from_utf8_lossy(&resumed.stderr);
    assert!(resumed.status.success(), "{said}");
    assert!(said.contains(&format!("step {more}/{more}")), "{said}");
}

#[test]
fn ctrl_c_while_text_becomes_tokens_ends_at_once_and_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let text = "the quick brown fox jumps over the lazy dog. ".repeat(1 << 20);
    std::fs::write(folder.path().join("text.txt"), text).expect("room for a text");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringspan"));
    command.current_dir(folder.path()).args(["train", "--data", "text.txt", "--out", "out"]);
    let training = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    let began = Instant::now();
    while !folder.path().join("out/tokens").exists() {
        assert!(began.elapsed() < Duration::from_secs(60), "no tokens after {:?}", began.elapsed());
        std::thread::sleep(Duration::from_millis(3));
    }
    let asked = Instant::now();
    let killed = Command::new("kill").args(["-INT", &training.id().to_string()]).status().expect("kill runs");
    assert!(killed.success());
    let output = training.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("interrupted while text.txt became tokens"), "{said}");
    assert!(asked.elapsed() < Duration::from_secs(5), "it took {:?}", asked.elapsed());
    assert!(!folder.path().join("out").exists(), "something is left");
}

#[test]
fn a_signal_ends_a_ring_of_many_threads_within_seconds() {
    let sizes = crate::support::Sizes { b: 1, sq: 1280, sk: 1280, h: 1, g: 1, d: 8, dv: 8 };
    let bench = crate::support::Bench::new(&sizes.tensors());
    let mut command = bench.command("attend");
    command.args([
        "in.safetensors",
        "--out",
        "out.safetensors",
        "--ring",
        "256",
        "--threads",
        "1",
        "--repeat",
        "10000",
    ]);
    let mut attending = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary starts");
    std::thread::sleep(Duration::from_secs(2));
    assert!(attending.try_wait().expect("a child").is_none(), "it ended by itself");
    let began = Instant::now();
    let killed = Command::new("kill").args(["-TERM", &attending.id().to_string()]).status().expect("kill runs");
    assert!(killed.success());
    assert_eq!(attending.wait().expect("it ends").code(), Some(130));
    assert!(began.elapsed() < Duration::from_secs(10), "it took {:?}", began.elapsed());
    assert_eq!(bench.files(), ["in.safetensors"]);
}
