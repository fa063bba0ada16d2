//! Dropout of attention's weights is the same on every mesh, for every accumulation and recomputation, and off in evaluation.

use crate::common::{of_tiny_model, run, text, tiny_config, tiny_model};
use ringspan_train::{Settings, TrainConfig, plan};
use std::path::Path;

fn settings(root: &Path, name: &str) -> Settings {
    Settings {
        sequence_length: Some(96),
        batch_size: Some(4),
        steps: Some(4),
        save_every: Some(0),
        optimizer: Some("sgd".into()),
        lr: Some(0.5),
        warmup: Some(0),
        ring: Some(1),
        ..of_tiny_model(root, name)
    }
}

/// Writes the tiny model with `share` as dropout in its configuration.
fn model(root: &Path, share: f64) {
    let path = tiny_model(root);
    let mut json = tiny_config();
    json["attention_dropout"] = share.into();
    std::fs::write(path.join("config.json"), json.to_string()).unwrap();
}

#[test]
fn every_mesh_accumulation_and_recomputation_drops_the_same() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    model(root, 0.4);
    text(root);
    let (_, expected) = run(settings(root, "one"));
    assert!(expected.plan.attention.contains("dropout 0.4"), "{}", expected.plan.attention);
    let (_, without) = run(Settings { attention_dropout: Some(0.0), ..settings(root, "without") });
    assert!((without.steps[0].loss - expected.steps[0].loss).abs() > 1e-4, "nothing is dropped");
    let mesh = |dp_replicate, dp_shard, ring, ulysses, tp| Settings {
        dp_replicate: Some(dp_replicate),
        dp_shard: Some(dp_shard),
        ring: Some(ring),
        ulysses: Some(ulysses),
        tp: Some(tp),
        ..Settings::default()
    };
    let micro = |n: usize, mesh: Settings| Settings { batch_size: Some(4 / n), grad_accumulation: Some(n), ..mesh };
    let again = |recompute: &str| Settings { recompute: Some(recompute.into()), ..Settings::default() };
    for (n, change) in [
        mesh(1, 2, 2, 1, 1),
        mesh(2, 1, 1, 2, 1),
        mesh(1, 4, 1, 1, 1),
        mesh(1, 1, 3, 1, 2),
        mesh(1, 1, 1, 1, 4),
        micro(4, Settings::default()),
        micro(2, mesh(1, 2, 1, 2, 1)),
        again("full"),
        again("nothing"),
    ]
    .into_iter()
    .enumerate()
    {
        let (_, memory) = run(change.overriding(&settings(root, &format!("mesh-{n}"))).unwrap());
        for (a, b) in memory.steps.iter().zip(&expected.steps) {
            assert!((a.loss - b.loss).abs() <= 1e-5 * b.loss, "{change:?}: {} is not {}", a.loss, b.loss);
            let off = (a.grad_norm - b.grad_norm).abs();
            assert!(off <= 1e-4 * b.grad_norm, "{change:?}: norm {} is not {}", a.grad_norm, b.grad_norm);
        }
    }
}

#[test]
fn the_held_out_text_is_read_whole_and_the_saved_model_says_what_it_said() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    model(root, 0.4);
    text(root);
    let look = |name: &str, share: Option<f64>| {
        let still = Settings { lr: Some(0.0), steps: Some(1), attention_dropout: share, ..settings(root, name) };
        let (outcome, memory) = run(still);
        let saved = ringspan_models::folder::config_json(&outcome.out).unwrap();
        assert_eq!(saved["attention_dropout"], 0.4);
        memory.evaluations.last().expect("a look").held_out_loss
    };
    assert_eq!(look("said", None), look("none", Some(0.0)));
    let impossible = Settings { attention_dropout: Some(1.0), ..settings(root, "all") };
    assert!(TrainConfig::resolve(impossible).unwrap_err().to_string().contains("--attention-dropout is 1"));
    let none = TrainConfig::resolve(Settings { attention_dropout: Some(0.0), ..settings(root, "plan") }).unwrap();
    assert!(!plan(&none).unwrap().attention.contains("dropout"));
}
