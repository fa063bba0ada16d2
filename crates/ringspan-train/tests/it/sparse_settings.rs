//! Tests of the settings of models with experts.

use crate::common::{Memory, of_tiny_model, run, sparse, text, tiny_model};
use ringspan_models::adapter;
use ringspan_train::{Settings, StepMetrics, TrainConfig, plan};
use std::path::Path;

fn settings(root: &Path, name: &str) -> Settings {
    Settings { ring: Some(1), steps: Some(1), ..of_tiny_model(root, name) }
}

#[test]
fn the_loss_of_routers_can_be_set_and_is_no_part_of_the_saved_model() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let path = tiny_model(root);
    text(root);
    let refused = Settings { router_aux_loss: Some(0.1), ..settings(root, "dense") };
    let message = plan(&TrainConfig::resolve(refused).unwrap()).unwrap_err().to_string();
    assert!(message.contains("--router-aux-loss") && message.contains("no experts"), "{message}");

    sparse(&path);
    let loss = |name: &str, factor: Option<f64>| {
        let (outcome, memory) = run(Settings { router_aux_loss: factor, ..settings(root, name) });
        let saved = ringspan_models::folder::config_json(&outcome.out).unwrap();
        assert_eq!(saved["router_aux_loss_coef"], 0.5, "as the model says");
        memory.steps[0].loss
    };
    // The model's configuration has a factor of 0.5.
    let (said, same, none, more) =
        (loss("said", None), loss("same", Some(0.5)), loss("none", Some(0.0)), loss("more", Some(1.0)));
    assert_eq!(said.to_bits(), same.to_bits());
    assert!(none + 0.4 < said && (more - said - (said - none)).abs() < 1e-5, "{none}, {said}, {more}");
}

/// However a step's sequences are distributed over micro-batches and ranks, the load is counted over all of them, and gradients agree;
/// with `micro-batch`, as Hugging Face does it, each micro-batch has a loss of its own.
#[test]
fn the_loss_of_routers_is_over_the_step_or_over_each_micro_batch() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let path = tiny_model(root);
    text(root);
    let all = |name: &str| Settings {
        batch_size: Some(4),
        steps: Some(3),
        optimizer: Some("sgd".into()),
        lr: Some(0.5),
        warmup: Some(0),
        grad_clip: Some(0.0),
        ..settings(root, name)
    };
    let dense = Settings { router_aux_loss_over: Some("step".into()), ..all("dense") };
    let message = plan(&TrainConfig::resolve(dense).unwrap()).unwrap_err().to_string();
    assert!(message.contains("--router-aux-loss-over has no effect"), "{message}");

    sparse(&path);
    let micro = |n: usize| Settings { batch_size: Some(4 / n), grad_accumulation: Some(n), ..Settings::default() };
    let run = |name: &str, change: Settings| run(change.overriding(&all(name)).unwrap()).1;
    let one = run("one", Settings::default());
    let apart = |memory: &Memory<'_>| {
        let of = |(a, b): (&StepMetrics, &StepMetrics)| {
            ((a.loss - b.loss).abs() / b.loss).max((a.grad_norm - b.grad_norm).abs() / b.grad_norm)
        };
        assert_eq!(memory.steps.len(), 3);
        memory.steps.iter().zip(&one.steps).map(of).fold(0.0, f64::max)
    };
    let meshes = [
        ("4 micro-batches", micro(4)),
        ("2 micro-batches", micro(2)),
        ("4 ranks with a sequence each", Settings { dp_shard: Some(4), ..Settings::default() }),
        ("2 micro-batches on a ring", Settings { ring: Some(2), ep: Some(2), ..micro(2) }),
        ("2 micro-batches in two parts", Settings { dp_shard: Some(2), tp: Some(2), ..micro(2) }),
    ];
    for (name, change) in meshes {
        let off = apart(&run(name, change));
        assert!(off < 1e-5, "{name}: {off:e} apart");
    }
    let of_each = |n: usize| Settings { router_aux_loss_over: Some("micro-batch".into()), ..micro(n) };
    let off = apart(&run("each alone", of_each(1)));
    assert!(off < 1e-6, "there is one: {off:e} apart");
    let four = run("each of 4", of_each(4));
    assert!(apart(&four) > 1e-4, "four losses are not one: {:e} apart", apart(&four));
    assert!(four.plan.optimizer.contains("mean loss of their load in a micro-batch"), "{}", four.plan.optimizer);
    let on_ranks = Settings { dp_shard: Some(1), ring: Some(2), ..of_each(4) };
    let again = run("each of 4 on a ring", on_ranks);
    for (a, b) in again.steps.iter().zip(&four.steps) {
        assert!((a.loss - b.loss).abs() <= 1e-5 * b.loss, "{} is not {}", a.loss, b.loss);
    }
}

#[test]
fn adapters_stand_beside_every_expert_and_beside_the_router_if_it_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    sparse(&tiny_model(root));
    text(root);
    let adapters = Settings { lora_rank: Some(2), ..settings(root, "adapters") };
    let (outcome, _) = run(adapters.clone());
    let saved = adapter::load(&outcome.out).unwrap();
    // Each of two layers has four matrices in attention, and three in each of six experts.
    assert_eq!(saved.weights.len(), 2 * (4 + 3 * 6) * 2);
    assert!(saved.weights.contains_key("model.layers.1.mlp.experts.5.down_proj.lora_A.weight"));
    let router = |name: &str| Settings {
        lora_targets: Some("q_proj, gate".into()),
        out: Some(root.join(name)),
        ..adapters.clone()
    };
    let (outcome, _) = run(router("router"));
    assert!(adapter::load(&outcome.out).unwrap().weights.contains_key("model.layers.0.mlp.gate.lora_B.weight"));
    tiny_model(root);
    let message = plan(&TrainConfig::resolve(router("dense")).unwrap()).unwrap_err().to_string();
    assert!(message.contains("'gate'") && message.contains("q_proj"), "{message}");
}
