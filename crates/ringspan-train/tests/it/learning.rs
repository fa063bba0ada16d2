//! The loss falls on real text, over two ranks. The text is one that nobody edits, so the bounds stay valid.

use crate::common::run;
use ringspan_train::Settings;
use std::path::Path;

#[test]
fn two_ranks_and_the_defaults_learn_the_text_of_the_licence() {
    let folder = tempfile::tempdir().unwrap();
    let (outcome, memory) = run(Settings {
        data: Some(vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../../LICENSE-APACHE")]),
        out: Some(folder.path().join("out")),
        sequence_length: Some(1024),
        ring: Some(2),
        steps: Some(60),
        sample_tokens: Some(20),
        ..Settings::default()
    });
    let losses = memory.losses();
    assert!((5.4..5.7).contains(&losses[0]), "a new model knows nothing: ln 257 = 5.55, not {}", losses[0]);
    let last: f64 = losses[50..].iter().sum::<f64>() / 10.0;
    assert!(last < 2.3, "mean loss of the last ten steps is {last}");
    let evaluation = outcome.evaluation.unwrap();
    assert!(evaluation.held_out_loss < 2.9, "held-out loss is {}", evaluation.held_out_loss);
    let sample = outcome.sample.unwrap();
    assert!(!sample.prompt.is_empty() && !sample.continuation.is_empty());
}
