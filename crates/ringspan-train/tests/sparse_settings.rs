//! What settings mean for models with experts.

mod common;

use common::{run, sparse, text, tiny_model};
use ringspan_models::adapter;
use ringspan_train::{Settings, TrainConfig, plan};
use std::path::Path;

fn settings(root: &Path, name: &str) -> Settings {
    Settings {
        model: Some(root.join("tiny")),
        data: Some(vec![root.join("text.jsonl")]),
        out: Some(root.join(name)),
        sample_tokens: Some(0),
        sequence_length: Some(64),
        ring: Some(1),
        steps: Some(1),
        ..Settings::default()
    }
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
    // The model says 0.5.
    let (said, same, none, more) =
        (loss("said", None), loss("same", Some(0.5)), loss("none", Some(0.0)), loss("more", Some(1.0)));
    assert_eq!(said.to_bits(), same.to_bits());
    assert!(none + 0.4 < said && (more - said - (said - none)).abs() < 1e-5, "{none}, {said}, {more}");
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
    // Two layers, each with four matrices of attention, and three of each of six experts.
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
