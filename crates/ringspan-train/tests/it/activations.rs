//! Training with stored activations in bf16 learns nearly the same as in f32, on every mesh, and a resumed run may change the
//! type.

use crate::common::{Memory, run, sparse, text, tiny_model};
use ringspan_train::{Settings, TrainArgs, TrainConfig, train};
use std::sync::atomic::AtomicBool;

/// The forward pass sees no rounding, so losses differ only by what gradients, which are off by less than a hundredth, do to the
/// weights: in ten steps, by far less than the losses move.
#[test]
fn losses_stay_close_on_every_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let (model, data) = (tiny_model(root), text(root));
    let settings = |name: &str, activations: &str, recompute: &str| Settings {
        model: Some(model.clone()),
        data: Some(vec![data.clone()]),
        out: Some(root.join(name)),
        activations: Some(activations.into()),
        recompute: Some(recompute.into()),
        sequence_length: Some(64),
        batch_size: Some(4),
        steps: Some(10),
        lr: Some(1e-2),
        sample_tokens: Some(0),
        ..Settings::default()
    };
    let losses = |settings: Settings| run(settings).1.steps.iter().map(|step| step.loss).collect::<Vec<_>>();
    let one = Settings { ring: Some(1), ..settings("whole", "f32", "keep-attention") };
    let whole = losses(one);
    assert!(whole[0] - whole[9] > 1.0, "it learns: {whole:?}");
    for (name, recompute, ring, ulysses, tp) in [
        ("one", "nothing", 1, 1, 1),
        ("ring", "nothing", 3, 1, 1),
        ("grid", "keep-attention", 2, 2, 1),
        ("shared layers", "nothing", 1, 1, 2),
        ("inputs", "full", 2, 1, 1),
    ] {
        let mesh =
            Settings { ring: Some(ring), ulysses: Some(ulysses), tp: Some(tp), ..settings(name, "bf16", recompute) };
        let rounded = losses(mesh);
        assert!((rounded[0] - whole[0]).abs() < 1e-5, "{name}: the first step knows no rounding");
        let off = rounded.iter().zip(&whole).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
        assert!(off > 1e-9 && off < 2e-3, "{name}: losses are off by {off:.1e}: {rounded:?}, {whole:?}");
    }
    // A resumed run may change the type of its activations.
    let given = Settings { steps: Some(12), activations: Some("f32".into()), ..Settings::default() };
    let args =
        TrainArgs { dry_run: false, config: None, settings: Settings { resume: Some(root.join("ring")), ..given } };
    let mut memory = Memory::default();
    train(&TrainConfig::from_args(&args).unwrap(), &AtomicBool::new(false), &mut memory).unwrap();
    assert_eq!(memory.steps.iter().map(|step| step.step).collect::<Vec<_>>(), [11, 12]);
}

/// With experts, too: in recomputation, tokens go to the experts of the forward pass.
#[test]
fn losses_of_a_sparse_model_stay_close_on_every_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let (model, data) = (tiny_model(root), text(root));
    sparse(&model);
    let settings = |name: &str, activations: &str, recompute: &str| Settings {
        model: Some(model.clone()),
        data: Some(vec![data.clone()]),
        out: Some(root.join(name)),
        activations: Some(activations.into()),
        recompute: Some(recompute.into()),
        sequence_length: Some(64),
        batch_size: Some(4),
        steps: Some(10),
        lr: Some(1e-2),
        sample_tokens: Some(0),
        ..Settings::default()
    };
    let losses = |settings: Settings| run(settings).1.steps.iter().map(|step| step.loss).collect::<Vec<_>>();
    let whole = losses(Settings { ring: Some(1), ..settings("whole", "f32", "keep-attention") });
    assert!(whole[0] - whole[9] > 1.0, "it learns: {whole:?}");
    for (name, recompute, ring, tp, ep, moe_dp) in [
        ("one", "nothing", 1, 1, None, None),
        ("inputs", "full", 2, 1, None, None),
        ("distributed", "nothing", 3, 1, Some(3), None),
        ("by width", "nothing", 2, 1, Some(1), Some(1)),
        ("both", "nothing", 2, 2, Some(2), None),
        ("both, with attention", "keep-attention", 4, 1, Some(2), Some(1)),
    ] {
        let mesh = Settings { ring: Some(ring), tp: Some(tp), ep, moe_dp, ..settings(name, "bf16", recompute) };
        let rounded = losses(mesh);
        assert!((rounded[0] - whole[0]).abs() < 1e-5, "{name}: the first step knows no rounding");
        let off = rounded.iter().zip(&whole).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
        assert!(off > 1e-9 && off < 5e-3, "{name}: losses are off by {off:.1e}: {rounded:?}, {whole:?}");
    }
}
