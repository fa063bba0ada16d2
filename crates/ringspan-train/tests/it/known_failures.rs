//! Tests against failures of another system's context parallelism that concern training (B3 to B5, B7 and B8 are tested in
//! `ringspan-serve`). Every rank holds real tokens, rows are ragged, and differences are relative L2.

use crate::common::{run, text, tiny_model};
use ringspan_candle::Weights;
use ringspan_models::folder;
use ringspan_train::Settings;
use std::path::Path;

/// Takes one plain gradient step: the weights move by the gradient times the learning rate.
fn step(root: &Path, ring: usize, dp_replicate: usize) -> (f64, Weights) {
    let (outcome, memory) = run(Settings {
        model: Some(root.join("tiny")),
        data: Some(vec![root.join("text.jsonl")]),
        out: Some(root.join(format!("out-{ring}-{dp_replicate}"))),
        sample_tokens: Some(0),
        sequence_length: Some(61),
        batch_size: Some(2),
        ring: Some(ring),
        dp_replicate: Some(dp_replicate),
        layout: Some("contiguous".into()),
        steps: Some(1),
        optimizer: Some("sgd".into()),
        lr: Some(1.0),
        warmup: Some(0),
        weight_decay: Some(0.0),
        grad_clip: Some(0.0),
        ..Settings::default()
    });
    (memory.losses()[0], folder::load(&outcome.out).unwrap().1)
}

fn values(weights: &Weights, name: &str) -> Vec<f32> {
    weights[name].flatten_all().unwrap().to_vec1().unwrap()
}

/// Largest relative L2 difference between the movements of a parameter on two meshes; asserts that every parameter moved on one.
fn worst(before: &Weights, one: &Weights, many: &Weights) -> f64 {
    let mut worst = 0.0f64;
    for name in before.keys() {
        let (before, one, many) = (values(before, name), values(one, name), values(many, name));
        let gradient: f64 = one.iter().zip(&before).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        assert!(gradient > 0.0, "{name} has no gradient");
        let off: f64 = one.iter().zip(&many).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        worst = worst.max((off / gradient).sqrt());
    }
    worst
}

/// B1: gradients were only summed over a rank's own tokens.
#[test]
fn b1_gradients_are_summed_over_all_ranks_of_the_ring() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    text(root);
    let (_, before) = folder::load(&root.join("tiny")).unwrap();
    let (_, one) = step(root, 1, 1);
    for ring in [2, 3, 5] {
        let (_, many) = step(root, ring, 1);
        // The stored weights are rounded, so the step computed from them is accurate to about 1e-5.
        let worst = worst(&before, &one, &many);
        assert!(worst <= 5e-5, "ring {ring}: gradients differ by {worst:e}");
    }
}

/// B2: the loss was divided by the number of a rank's own targets.
#[test]
fn b2_the_loss_divides_by_the_targets_of_all_ranks() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    text(root);
    let (one, _) = step(root, 1, 1);
    for (ring, copies) in [(2, 1), (3, 1), (7, 1), (1, 2), (3, 2)] {
        let (many, _) = step(root, ring, copies);
        assert!((many / one - 1.0).abs() <= 1e-6, "ring {ring} x {copies} copies: loss {many} is not {one}");
    }
}

/// B6: the other axes failed where context parallelism was built in but not used.
#[test]
fn b6_other_axes_work_where_the_ring_is_one() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    text(root);
    let (_, before) = folder::load(&root.join("tiny")).unwrap();
    let ((_, one), (_, copies)) = (step(root, 1, 1), step(root, 1, 2));
    let worst = worst(&before, &one, &copies);
    assert!(worst <= 5e-5, "two copies: gradients differ by {worst:e}");
}
