//! Text is tokenized in little memory, however long it is.

use crate::counting;
use ringspan_train::{Settings, TrainConfig, plan};
use std::{
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

/// Writes about `bytes` of text: records of many lengths, or one long text.
fn write(path: &Path, bytes: usize, records: bool) -> PathBuf {
    let mut file = BufWriter::new(File::create(path).unwrap());
    let (mut written, mut number) = (0, 0_usize);
    while written < bytes {
        number += 1;
        let words: String =
            (0..1 + number * 7 % 60).map(|word| format!("word {} of {number}; ", word * number % 13)).collect();
        let text = if records { serde_json::json!({ "text": words }).to_string() } else { words };
        writeln!(file, "{text}").unwrap();
        written += text.len() + 1;
    }
    file.flush().unwrap();
    path.to_owned()
}

/// The most bytes in use while text is tokenized and a plan is made, and the plan's line about the data.
fn peak(root: &Path, data: PathBuf) -> (usize, String) {
    let settings = Settings {
        data: Some(vec![data]),
        out: Some(root.join("out")),
        sequence_length: Some(256),
        ring: Some(1),
        threads: Some(1),
        steps: Some(4),
        ..Settings::default()
    };
    let config = TrainConfig::resolve(settings).unwrap();
    let (plan, most) = counting::most_of(|| plan(&config).unwrap());
    (most, plan.data)
}

const MEGABYTE: usize = 1 << 20;

/// A plan for a short text takes the memory of model and tokenizer alone, which is the measure.
#[test]
fn memory_does_not_grow_with_the_text() {
    let _alone = counting::alone();
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let (least, _) = peak(root, write(&root.join("short.txt"), 2000, false));
    for (name, records) in [("long.jsonl", true), ("long.txt", false)] {
        let data = write(&root.join(name), 12 * MEGABYTE, records);
        let (first, said) = peak(root, data.clone());
        assert!(said.contains("tokens read"), "{said}");
        // The tokenizer itself caches up to ten thousand words.
        assert!(first < least + 40 * MEGABYTE, "{name}: {first} bytes, {least} for a short text");
        let (kept, _) = peak(root, data);
        assert!(kept < least + 5 * MEGABYTE, "{name}: {kept} bytes with kept tokens, {least} for a short text");
    }
}

/// Run by hand, since it takes minutes and 10 GB of disk: `cargo test --release -p ringspan-train --test memory two_gigabytes --
/// --ignored`.
#[cfg(target_os = "linux")]
#[test]
#[ignore = "2 GB of text"]
fn two_gigabytes_take_less_than_three_hundred_megabytes() {
    let _alone = counting::alone();
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let data = write(&root.join("long.jsonl"), 2000 * MEGABYTE, true);
    let began = std::time::Instant::now();
    let (allocated, said) = peak(root, data);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim().to_owned();
    println!("{said}: {allocated} bytes allocated at most, {resident} resident, {:?}", began.elapsed());
    let kilobytes: usize = resident.trim_end_matches(" kB").parse().unwrap();
    assert!(kilobytes < 300_000, "{resident}");
}
