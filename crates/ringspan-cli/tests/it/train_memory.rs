//! The line on memory that `train` prints after a run: the plan's prediction, and the allocator's count.

use crate::support::megabytes;
use std::path::Path;
use std::process::Command;

/// The lines that a training prints.
fn train(folder: &Path, more: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringspan"));
    command
        .current_dir(folder)
        .args(["train", "--data", "text.txt", "--sequence-length", "16384", "--steps", "2", "--sample-tokens", "0"])
        .args(more);
    let output = command.output().expect("the binary starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_allocated_peak_is_what_the_plan_predicted() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    // Tokenizing the text would take a tenth of the peak, so the tokens are prepared first and read from their file, as in
    // later runs.
    let text = "the quick brown fox jumps over the lazy dog. ".repeat(50_000);
    std::fs::write(folder.path().join("text.txt"), text).expect("room for a text");
    for (name, ring) in [("one", "1"), ("two", "2")] {
        let said = train(folder.path(), &["--out", name, "--eval-tokens", "8192", "--ring", ring]);
        let [predicted, allocated] = ["predicted", "allocated"].map(|word| megabytes(&said, word));
        assert!(predicted > 80.0, "{name}: {predicted} MB leave too little beside program and tokenizer");
        let ratio = allocated / predicted;
        assert!((0.9..1.1).contains(&ratio), "{name}: {predicted} MB predicted, {allocated} MB allocated");
        if cfg!(target_os = "linux") {
            assert!(megabytes(&said, "resident") > allocated, "{said}");
        }
        let metrics = std::fs::read_to_string(folder.path().join(name).join("metrics.jsonl")).expect("metrics");
        let line: serde_json::Value =
            metrics.lines().nth(1).and_then(|line| serde_json::from_str(line).ok()).expect("a second step");
        let of_step = line["peak_allocated"].as_f64().expect("a number") / 1e6;
        assert!(of_step <= allocated + 1.0 && of_step > 0.9 * allocated, "{name}: {of_step} MB of {allocated}");
    }
}
