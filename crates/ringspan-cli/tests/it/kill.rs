//! kill -9 at any moment of a run that saves at every step: the run can be resumed, with the losses of a run that was never
//! killed.
#![cfg(unix)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const KILLS: u64 = 50;
const LONGEST: Duration = Duration::from_secs(60);

fn training(folder: &Path, arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringspan"));
    command.current_dir(folder).arg("train").args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().expect("the binary starts")
}

/// Losses of the steps so far, as bits; an incomplete last line is ignored.
fn losses(out: &Path) -> BTreeMap<u64, u64> {
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
    let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let lines = lines.filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    lines.filter_map(|line| Some((line["step"].as_u64()?, line["loss"].as_f64()?.to_bits()))).collect()
}

fn newest(out: &Path) -> u64 {
    let entries = std::fs::read_dir(out.join("checkpoints")).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).max().unwrap_or(0)
}

fn wait_for(what: &str, mut there: impl FnMut() -> bool) {
    let began = Instant::now();
    while !there() {
        assert!(began.elapsed() < LONGEST, "no {what} after {:?}", began.elapsed());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_run_killed_at_fifty_moments_loses_no_step_that_was_saved() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let text = "the quick brown fox jumps over the lazy dog. ".repeat(400);
    std::fs::write(folder.path().join("text.txt"), text).expect("room for a text");
    let start = |out| {
        let rest = ["--sequence-length", "64", "--steps", "100000", "--save-every", "1", "--keep", "1", "--ring", "2"];
        [&["--data", "text.txt", "--out", out][..], &rest].concat()
    };
    let out = folder.path().join("killed");
    let mut saved = 0;
    for kill in 0..KILLS {
        let mut run = match saved {
            0 => training(folder.path(), &start("killed")),
            _ => training(folder.path(), &["--resume", "killed"]),
        };
        wait_for("new checkpoint", || newest(&out) > saved);
        // The delay may hit any moment of a step or of a save, which take some milliseconds each.
        std::thread::sleep(Duration::from_micros(kill * 7919 % 20_000));
        run.kill().expect("it still runs");
        run.wait().expect("it has ended");
        let left = newest(&out);
        assert!(left > saved, "kill {kill}: {left} steps are left of {saved}");
        saved = left;
    }
    let killed = losses(&out);
    assert!((1..=saved).all(|step| killed.contains_key(&step)), "every saved step has its line");

    let mut whole = training(folder.path(), &start("whole"));
    let out = folder.path().join("whole");
    wait_for("so many steps", || losses(&out).len() as u64 >= saved);
    whole.kill().expect("it still runs");
    whole.wait().expect("it has ended");
    let whole = losses(&out);
    for step in 1..=saved {
        assert_eq!(killed[&step], whole[&step], "the loss of step {step} of {saved}");
    }
}
