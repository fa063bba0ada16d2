//! Tests of which documents are trained on, which are for evaluation, and how those longer than a sequence are treated.

use crate::common::{Memory, conversations, of_tiny_model, run, text, tiny_model};
use ringspan_train::{Settings, TrainArgs, TrainConfig, plan, train};
use std::{fs, path::Path, sync::atomic::AtomicBool};

fn settings(root: &Path, name: &str) -> Settings {
    Settings { ring: Some(1), steps: Some(4), warmup: Some(0), ..of_tiny_model(root, name) }
}

fn planned(settings: Settings) -> Result<String, String> {
    let plan = plan(&TrainConfig::resolve(settings).unwrap());
    plan.map(|plan| plan.to_string()).map_err(|error| error.to_string())
}

#[test]
fn evaluation_uses_texts_of_its_own_a_share_or_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    let data = text(root);
    // Nine bytes and an end of text have nine targets.
    let judges = root.join("judges.txt");
    fs::write(&judges, "nine byte").unwrap();
    let (outcome, memory) = run(Settings { eval_data: Some(judges.clone()), ..settings(root, "own") });
    assert_eq!(outcome.evaluation.unwrap().held_out_targets, 9);
    assert!(memory.plan.data.contains("10 held out in") && memory.plan.data.contains("judges.txt"), "{}", memory.plan);
    let all: usize =
        fs::read_to_string(&data).unwrap().lines().map(|line| line.len() - "{\"text\":\"\"}".len() + 1).sum();
    let words = memory.plan.data.replace(',', "");
    // The first token of each of the forty texts is never a target.
    let counts = format!("{all} tokens read {} tokens learned", all - 40);
    assert!(words.contains(&counts), "{words}: {counts}");

    let (outcome, memory) = run(Settings { held_out: Some(0.0), sample_tokens: None, ..settings(root, "none") });
    assert!(outcome.evaluation.is_none() && memory.evaluations.is_empty());
    assert!(memory.plan.data.contains(", 0 held out"), "{}", memory.plan.data);
    let targets = |share, name: &str| {
        run(Settings { held_out: share, ..settings(root, name) }).0.evaluation.unwrap().held_out_targets
    };
    assert!(targets(Some(0.4), "more") > 2 * targets(None, "usual"));

    // An evaluation file inside the training data is not learned.
    let inside = root.join("corpus");
    fs::create_dir(&inside).unwrap();
    fs::copy(&data, inside.join("train.jsonl")).unwrap();
    fs::copy(&data, inside.join("test.jsonl")).unwrap();
    let of = |eval: Option<&str>| {
        let eval_data = eval.map(|name| inside.join(name));
        planned(Settings { data: Some(vec![inside.clone()]), eval_data, ..settings(root, "inside") }).unwrap()
    };
    let plan = of(None);
    assert!(plan.contains("80 documents") && plan.contains("warning    test.jsonl is learned"), "{plan}");
    let plan = of(Some("test.jsonl"));
    assert!(plan.contains("40 documents") && !plan.contains("warning"), "{plan}");
}

#[test]
fn conversations_are_never_cut_in_two_and_the_plan_counts_those_that_are_too_long() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    let (data, template) = conversations(root);
    let chat = |name: &str, overlong: Option<&str>| Settings {
        data: Some(vec![data.clone()]),
        chat_template: Some(template.clone()),
        overlong: overlong.map(String::from),
        sequence_length: Some(256),
        batch_size: Some(2),
        ..settings(root, name)
    };
    let words = |overlong| planned(chat("plan", overlong)).unwrap();
    let plan = words(None);
    assert!(
        plan.contains("no document is cut by another") && plan.contains("longer than 256 tokens are truncated"),
        "{plan}"
    );
    assert!(words(Some("drop")).contains("longer than 256 tokens are left out"));
    assert!(words(Some("split")).contains("longer than 256 tokens are split"));
    assert!(
        planned(Settings { data: Some(vec![text(root)]), ..settings(root, "plan") })
            .unwrap()
            .contains("cut where a sequence ends")
    );
    let short = Settings { sequence_length: Some(16), ..chat("plan", Some("drop")) };
    let message = planned(short).unwrap_err();
    assert!(message.contains("every document is longer than 16 tokens") && message.contains("--overlong"), "{message}");

    // The losses are the same on every mesh, and when the run is resumed at any step.
    let (whole, expected) = run(chat("whole", None));
    for (name, ring, packing) in [("ring", 3, None), ("balanced", 1, Some("balanced"))] {
        let settings = Settings { ring: Some(ring), packing: packing.map(String::from), ..chat(name, None) };
        let (_, memory) = run(settings);
        if packing.is_none() {
            for (a, b) in memory.losses().iter().zip(expected.losses()) {
                assert!((a - b).abs() <= 1e-6 * b, "{a} is not {b}");
            }
        }
        assert_eq!(memory.losses().len(), 4);
    }
    let (cut, _) =
        run(Settings { steps: Some(2), save_every: Some(1), schedule: Some("constant".into()), ..chat("cut", None) });
    let (long, expected) = run(Settings { schedule: Some("constant".into()), ..chat("long", None) });
    let resume = Settings { resume: Some(cut.out.clone()), steps: Some(4), ..Settings::default() };
    let args = TrainArgs { settings: resume, ..TrainArgs::default() };
    let mut memory = Memory::default();
    train(&TrainConfig::from_args(&args).unwrap(), &AtomicBool::new(false), &mut memory).unwrap();
    assert_eq!(memory.losses(), expected.losses()[2..]);
    let bytes = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
    assert_eq!(bytes(&cut.out), bytes(&long.out));
    assert_ne!(bytes(&cut.out), bytes(&whole.out), "another schedule");
}
