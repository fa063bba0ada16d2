//! Tests of the metrics that say how well a step used the machine.

use crate::common::{run, tiny_model};
use ringspan_train::Settings;

#[test]
fn imbalance_is_that_of_the_layout_and_shares_are_shares() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    // Each row is a part of one document.
    let line = serde_json::json!({ "text": "a".repeat(2000) }).to_string();
    std::fs::write(root.join("text.jsonl"), [line.clone(), line].join("\n")).unwrap();
    let settings = |layout: &str| Settings {
        model: Some(root.join("tiny")),
        data: Some(vec![root.join("text.jsonl")]),
        out: Some(root.join(layout)),
        sequence_length: Some(256),
        steps: Some(2),
        ring: Some(2),
        layout: Some(layout.into()),
        sample_tokens: Some(0),
        ..Settings::default()
    };
    for (layout, expected) in [("contiguous", 1.5), ("zigzag", 1.0)] {
        let (outcome, memory) = run(settings(layout));
        for step in &memory.steps {
            assert!((step.attention_imbalance - expected).abs() < 0.02, "{layout}: {}", step.attention_imbalance);
            assert!(step.peak_share.is_some_and(|share| share > 0.0 && share < 1.0), "{:?}", step.peak_share);
            assert!((0.0..=1.0).contains(&step.waited), "{}", step.waited);
            assert_eq!(step.peak_memory.is_some(), cfg!(target_os = "linux"));
            assert_eq!(step.peak_allocated, None, "nobody counts here");
        }
        let text = std::fs::read_to_string(outcome.metrics).unwrap();
        for key in ["peak_share", "waited", "attention_imbalance"] {
            assert!(text.lines().next().unwrap().contains(key), "{key}");
        }
    }
}
