//! Adapters with dropout are trained to the same losses on every mesh, and evaluated without dropout.

use crate::common::{of_tiny_model, run, sparse, text, tiny_model};
use ringspan_models::adapter;
use ringspan_train::Settings;
use std::path::Path;

fn settings(root: &Path, name: &str) -> Settings {
    Settings {
        sequence_length: Some(96),
        batch_size: Some(4),
        grad_accumulation: Some(2),
        steps: Some(5),
        save_every: Some(0),
        lr: Some(2e-2),
        warmup: Some(0),
        lora_rank: Some(4),
        lora_dropout: Some(0.4),
        ring: Some(1),
        ..of_tiny_model(root, name)
    }
}

#[test]
fn every_mesh_and_every_recomputation_has_the_same_losses() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    text(root);
    let (one, expected) = run(settings(root, "one"));
    assert!(expected.plan.training.contains("dropout 0.4"), "{}", expected.plan.training);
    assert_eq!(adapter::load(&one.out).unwrap().lora.dropout, 0.4);
    let (_, without) = run(Settings { lora_dropout: None, ..settings(root, "without") });
    // New adapters add nothing, whatever of their input is dropped.
    assert_eq!(without.steps[0].loss, expected.steps[0].loss);
    assert!((without.steps[4].loss - expected.steps[4].loss).abs() > 1e-3, "nothing is dropped");
    let mesh = |dp_replicate, dp_shard, ring, ulysses, tp| Settings {
        dp_replicate: Some(dp_replicate),
        dp_shard: Some(dp_shard),
        ring: Some(ring),
        ulysses: Some(ulysses),
        tp: Some(tp),
        ..Settings::default()
    };
    let again = |recompute: &str| Settings { recompute: Some(recompute.into()), ..Settings::default() };
    let all = [
        mesh(1, 2, 2, 1, 1),
        mesh(2, 1, 1, 2, 1),
        mesh(1, 1, 3, 1, 1),
        mesh(1, 4, 1, 1, 1),
        mesh(1, 2, 1, 1, 4),
        mesh(1, 1, 2, 1, 2),
        again("full"),
        again("nothing"),
    ];
    for (n, change) in all.iter().enumerate() {
        let (_, memory) = run(change.overriding(&settings(root, &format!("mesh-{n}"))).unwrap());
        for (a, b) in memory.losses().iter().zip(expected.losses()) {
            assert!((a - b).abs() <= 1e-5 * b, "{change:?}: {a} is not {b}");
        }
    }
}

/// Tokens travel to their experts, and their dropout stays the same.
#[test]
fn a_sparse_model_drops_the_same_on_every_mesh_however_it_is_computed_again() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    sparse(&tiny_model(root));
    text(root);
    let all = Settings {
        lora_targets: Some("q_proj,o_proj,gate,gate_proj,up_proj,down_proj".into()),
        recompute: Some("full".into()),
        ..settings(root, "")
    };
    let run = |name: &str, change: Settings| {
        run(Settings { out: Some(root.join(name)), ..change.overriding(&all).unwrap() }).1.losses()
    };
    let expected = run("one", Settings::default());
    let without = run("without", Settings { lora_dropout: Some(0.0), ..Settings::default() });
    assert!((without[4] - expected[4]).abs() > 1e-3, "nothing is dropped");
    let mesh = |dp_shard, ring, tp, ep| Settings {
        dp_shard: Some(dp_shard),
        ring: Some(ring),
        tp: Some(tp),
        ep: Some(ep),
        ..Settings::default()
    };
    let nothing = Settings { recompute: Some("nothing".into()), ..mesh(1, 2, 1, 2) };
    for (n, change) in [nothing, mesh(2, 1, 2, 2), mesh(1, 2, 2, 1), mesh(2, 2, 1, 4)].into_iter().enumerate() {
        let what = format!("{change:?}");
        for (a, b) in run(&format!("mesh-{n}"), change).iter().zip(&expected) {
            assert!((a - b).abs() <= 1e-5 * b, "{what}: {a} is not {b}");
        }
    }
}

#[test]
fn the_held_out_text_is_read_without_dropout() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    text(root);
    let (trained, memory) = run(Settings { lora_merge: Some(true), ..settings(root, "trained") });
    let merged = Settings {
        model: Some(trained.out),
        lr: Some(0.0),
        steps: Some(1),
        lora_rank: None,
        lora_dropout: None,
        ..settings(root, "merged")
    };
    let (_, again) = run(merged);
    let [a, b] = [&memory, &again].map(|memory| memory.evaluations.last().expect("a look").held_out_loss);
    assert!((a - b).abs() < 1e-5 * b, "{a} is not {b}");
}
