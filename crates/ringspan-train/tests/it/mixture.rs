//! Several sources are learned in their shares, on every mesh, and from any step on.

use crate::common::{Memory, conversations, run, text, tiny_model};
use ringspan_train::{Settings, TrainArgs, TrainConfig, plan, train};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

fn settings(root: &Path, name: &str, data: &[&str]) -> Settings {
    Settings {
        model: Some(root.join("tiny")),
        data: Some(data.iter().map(|data| root.join(data)).collect()),
        chat_template: Some(root.join("template.jinja")),
        out: Some(root.join(name)),
        token_cache: Some(root.join("tokens")),
        sample_tokens: Some(0),
        sequence_length: Some(128),
        batch_size: Some(2),
        ring: Some(1),
        steps: Some(6),
        schedule: Some("constant".into()),
        ..Settings::default()
    }
}

fn prepared() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_owned();
    tiny_model(&root);
    text(&root);
    conversations(&root);
    fs::write(root.join("book.txt"), "a book of many words. ".repeat(300)).unwrap();
    (folder, root)
}

#[test]
fn sources_are_mixed_alike_on_every_mesh_and_over_a_resumption() {
    let (_folder, root) = prepared();
    let data = ["text.jsonl=0.5", "chat.jsonl=0.3", "book.txt=0.2"];
    let (_, one) = run(settings(&root, "one", &data));
    assert_eq!(one.losses().len(), 6);
    for (name, ring, shard, packing) in [("ring", 3, 1, None), ("shards", 1, 2, None), ("both", 2, 2, None)] {
        let on = Settings { ring: Some(ring), dp_shard: Some(shard), packing, ..settings(&root, name, &data) };
        let (_, memory) = run(on);
        for (a, b) in memory.losses().iter().zip(one.losses()) {
            assert!((a - b).abs() <= 1e-6 * b, "{name}: {a} is not {b}");
        }
    }
    for packing in ["in-order", "balanced"] {
        let packed = |name: &str| Settings { packing: Some(packing.into()), ..settings(&root, name, &data) };
        let (whole, expected) = run(packed(&format!("whole {packing}")));
        let half = Settings { steps: Some(3), warmup: Some(0), ..packed(&format!("half {packing}")) };
        let (half, _) = run(half);
        let resume = Settings { resume: Some(half.out.clone()), steps: Some(6), ..Settings::default() };
        let mut memory = Memory::default();
        let args = TrainArgs { settings: resume, ..TrainArgs::default() };
        train(&TrainConfig::from_args(&args).unwrap(), &AtomicBool::new(false), &mut memory).unwrap();
        assert_eq!(memory.losses(), expected.losses()[3..], "{packing}");
        let bytes = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
        assert_eq!(bytes(&half.out), bytes(&whole.out));
    }
    let (_, other) = run(settings(&root, "other", &["text.jsonl=0.2", "chat.jsonl=0.3", "book.txt=0.5"]));
    assert_ne!(other.losses(), one.losses());
}

#[test]
fn the_plan_says_what_is_read_and_learned_of_each_source() {
    let (_folder, root) = prepared();
    let plan = |data: &[&str]| {
        let plan = plan(&TrainConfig::resolve(settings(&root, "plan", data)).unwrap());
        plan.map(|plan| plan.to_string()).map_err(|error| error.to_string())
    };
    let words = plan(&["text.jsonl=2", "chat.jsonl=1", "book.txt=1"]).unwrap();
    for part in [
        "3 sources, mixed by weight: ",
        "50.0 % of the sequences: 40 documents of ",
        "25.0 % of the sequences: 40 documents of ",
        "25.0 % of the sequences: 1 documents of ",
        " tokens read, ",
        " tokens learned",
        "answers end with <|endoftext|>",
        "no document is cut by another",
        "documents are cut where a sequence ends",
        " over its sources)",
    ] {
        assert!(words.contains(part), "{part}: {words}");
    }
    assert!(plan(&["text.jsonl", "chat.jsonl"]).unwrap().contains("2 sources, mixed by size: "));
    // Sources that are mixed by size end a pass together.
    let sized = Settings { epochs: Some(2.0), steps: None, ..settings(&root, "sized", &["text.jsonl", "book.txt"]) };
    let sized = Settings { chat_template: None, ..sized };
    let sized = ringspan_train::plan(&TrainConfig::resolve(sized).unwrap()).unwrap();
    assert!(sized.passes_of_sources.iter().all(|passes| (passes - sized.passes.unwrap()).abs() < 0.05), "{sized}");
    let message = plan(&["text.jsonl", "book.txt"]).unwrap_err();
    assert!(message.contains("--chat-template") && message.contains("hold no conversations"), "{message}");
    let message = plan(&["text.jsonl", "missing.txt"]).unwrap_err();
    assert!(message.contains("missing.txt"), "{message}");
}
