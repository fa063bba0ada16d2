//! `train --dry-run` writes the plan, and the tokens of the text for the training that follows; nothing else.

use std::process::Command;

#[test]
fn the_plan_is_printed_and_only_tokens_are_written_whether_it_fits_or_not() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let text = "the quick brown fox jumps over the lazy dog. ".repeat(400);
    std::fs::write(folder.path().join("text.txt"), text).expect("room for a text");
    let run = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringspan"));
        command.current_dir(folder.path()).args(["train", "--data", "text.txt", "--dry-run"]).args(more);
        let output = command.output().expect("the binary starts");
        let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        (output.status.success(), out, err)
    };
    let (good, plan, said) = run(&["--sequence-length", "512", "--tp", "2", "--ring", "2"]);
    assert!(good && said.is_empty(), "{said}");
    for line in
        ["ring 2 x ulysses 1 x tp 2 = 4 ranks", "memory     about ", "wait for the backward pass", "sent       about "]
    {
        assert!(plan.contains(line), "{line}: {plan}");
    }
    if cfg!(target_os = "linux") {
        let (good, plan, said) = run(&["--sequence-length", "67108864"]);
        assert!(!good && plan.contains("memory     about "), "{plan}");
        for part in
            ["this needs about", "of memory is free", "the nearest that fits is --recompute full --sequence-length "]
        {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
    let names = |path: &std::path::Path| {
        let entries = std::fs::read_dir(path).expect("the folder").map(|entry| entry.expect("an entry").file_name());
        let mut names: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
        names.sort();
        names
    };
    assert_eq!(names(folder.path()), ["ringspan-out", "text.txt"]);
    assert_eq!(names(&folder.path().join("ringspan-out")), ["tokens"]);
    assert_eq!(names(&folder.path().join("ringspan-out/tokens")).len(), 1, "both plans have the same tokens");
}

#[test]
fn a_missing_file_is_named_with_the_answer_of_the_system_once() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringspan"));
    let output = command.current_dir(folder.path()).args(["train", "--data", "nothing", "--dry-run"]).output();
    let said = String::from_utf8(output.expect("the binary starts").stderr).expect("text");
    assert_eq!(said.matches("os error 2").count(), 1, "{said}");
    assert!(said.starts_with("error: cannot read nothing: "), "{said}");
}

#[test]
fn a_plan_is_made_where_nothing_can_be_written() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("text.txt"), "words ".repeat(400)).expect("room for a text");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringspan"));
    // A file has the name that the folder would have.
    command.current_dir(folder.path()).args([
        "train",
        "--data",
        "text.txt",
        "--dry-run",
        "--token-cache",
        "text.txt/x",
    ]);
    let output = command.output().expect("the binary starts");
    let plan = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && plan.contains("warning    the tokens are not kept: "), "{plan}");
}
