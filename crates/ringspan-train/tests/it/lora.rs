//! Adapters are trained, resumed and saved on any mesh, and their base model stays unchanged.

use crate::common::{Memory, of_tiny_model, run, sparse, text, tiny_model};
use ringspan_candle::Weights;
use ringspan_models::{adapter, folder};
use ringspan_train::{Settings, TrainArgs, TrainConfig, train};
use std::path::Path;
use std::sync::atomic::AtomicBool;

fn settings(root: &Path, name: &str) -> Settings {
    Settings {
        sequence_length: Some(96),
        batch_size: Some(4),
        steps: Some(6),
        save_every: Some(3),
        lr: Some(1e-2),
        warmup: Some(0),
        lora_rank: Some(4),
        ..of_tiny_model(root, name)
    }
}

fn values(weights: &Weights) -> Vec<f32> {
    weights.values().flat_map(|tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap()).collect()
}

#[track_caller]
fn near(what: &str, a: &Weights, b: &Weights, bound: f64) {
    assert!(a.keys().eq(b.keys()), "{what}");
    let (a, b) = (values(a), values(b));
    let norm: f64 = b.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let off: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt();
    assert!(off <= bound * norm, "{what}: {:e} apart", off / norm);
}

#[test]
fn every_mesh_trains_the_same_adapters_beside_an_unchanged_model() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    text(root);
    let before = std::fs::read(root.join("tiny/model.safetensors")).unwrap();
    let mesh = |dp_replicate, dp_shard, ring, ulysses, tp| Settings {
        dp_replicate: Some(dp_replicate),
        dp_shard: Some(dp_shard),
        ring: Some(ring),
        ulysses: Some(ulysses),
        tp: Some(tp),
        ..Settings::default()
    };
    let (one, expected) = run(mesh(1, 1, 1, 1, 1).overriding(&settings(root, "one")).unwrap());
    assert!(expected.steps[5].loss < expected.steps[0].loss - 0.1, "{:?}", expected.losses());
    let wanted = adapter::load(&one.out).unwrap();
    assert_eq!(wanted.weights.len(), 2 * 7 * 2);
    assert!(!one.out.join("config.json").exists(), "adapters alone are saved");
    let meshes =
        [mesh(1, 2, 2, 1, 1), mesh(2, 1, 1, 2, 1), mesh(1, 1, 3, 1, 1), mesh(1, 4, 1, 1, 1), mesh(1, 2, 1, 1, 4)];
    for (n, settings_of) in meshes.iter().enumerate() {
        let (many, memory) = run(settings_of.overriding(&settings(root, &format!("mesh-{n}"))).unwrap());
        for (a, b) in memory.steps.iter().zip(&expected.steps) {
            assert!(
                (a.loss - b.loss).abs() <= 1e-5 * b.loss,
                "mesh {n}, step {}: {} is not {}",
                a.step,
                a.loss,
                b.loss
            );
        }
        near(&format!("mesh {n}"), &adapter::load(&many.out).unwrap().weights, &wanted.weights, 1e-4);
    }
    assert_eq!(std::fs::read(root.join("tiny/model.safetensors")).unwrap(), before);
}

/// Ranks share experts with adapters whole or by their width, with sharding and without, and a run is resumed on another mesh.
#[test]
fn every_mesh_trains_the_same_adapters_of_experts() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    sparse(&tiny_model(root));
    text(root);
    let mesh = |dp_shard, ring, tp, ep, moe_dp| Settings {
        dp_shard: Some(dp_shard),
        ring: Some(ring),
        tp: Some(tp),
        ep: Some(ep),
        moe_dp: Some(moe_dp),
        ..Settings::default()
    };
    let (one, expected) = run(mesh(1, 1, 1, 1, 1).overriding(&settings(root, "one")).unwrap());
    assert!(expected.steps[5].loss < expected.steps[0].loss - 0.1, "{:?}", expected.losses());
    let wanted = adapter::load(&one.out).unwrap();
    let compare = |what: &str, losses: &[f64], got: &Path| {
        for (a, b) in losses.iter().rev().zip(expected.losses().iter().rev()) {
            assert!((a - b).abs() <= 1e-5 * b, "{what}: {a} is not {b}");
        }
        near(what, &adapter::load(got).unwrap().weights, &wanted.weights, 1e-4);
    };
    // Ranks share whole experts, or their width, or both; some of them have rows of their own.
    let without_truncation = Settings { sharding: Some("none".into()), ..mesh(1, 2, 2, 2, 1) };
    let meshes = [
        mesh(1, 2, 1, 2, 1),
        mesh(1, 1, 2, 1, 1),
        mesh(2, 1, 2, 2, 1),
        mesh(4, 1, 1, 2, 2),
        mesh(2, 2, 1, 1, 2),
        without_truncation,
    ];
    for (n, settings_of) in meshes.iter().enumerate() {
        let (many, memory) = run(settings_of.overriding(&settings(root, &format!("mesh-{n}"))).unwrap());
        compare(&format!("{settings_of:?}"), &memory.losses(), &many.out);
        if n != 2 {
            continue;
        }
        std::fs::remove_dir_all(many.out.join("checkpoints/step-000006")).unwrap();
        let resumed = Settings { resume: Some(many.out.clone()), ..mesh(1, 3, 1, 3, 1) };
        let args = TrainArgs { dry_run: false, config: None, settings: resumed };
        let mut memory = Memory::default();
        let again = train(&TrainConfig::from_args(&args).unwrap(), &AtomicBool::new(false), &mut memory).unwrap();
        assert_eq!(memory.steps.len(), 3, "it goes on from the checkpoint");
        compare("resumed on three ranks", &memory.losses(), &again.out);
    }
}

#[test]
fn adapters_of_experts_are_merged_into_the_model_that_is_saved() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    sparse(&tiny_model(root));
    text(root);
    let (outcome, _) = run(Settings { ep: Some(2), lora_merge: Some(true), ..settings(root, "merged") });
    let (_, merged) = folder::load(&outcome.out).unwrap();
    let (_, base) = folder::load(&root.join("tiny")).unwrap();
    let adapter = adapter::load(&outcome.out).unwrap();
    let name = "model.layers.1.mlp.experts.2.up_proj.weight";
    assert_ne!(
        values(&Weights::from([("".into(), merged[name].clone())])),
        values(&Weights::from([("".into(), base[name].clone())]))
    );
    near("merged", &merged, &adapter.lora.merge(base.into_iter().chain(adapter.weights).collect()).unwrap(), 1e-7);
}

#[test]
fn a_resumed_run_trains_the_same_adapters_bit_for_bit_and_merges_them() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    text(root);
    let merging = |name| Settings { ring: Some(2), lora_merge: Some(true), ..settings(root, name) };
    let (whole, _) = run(merging("whole"));
    let (cut, _) = run(merging("cut"));
    std::fs::remove_dir_all(cut.out.join("checkpoints/step-000006")).unwrap();
    let args = TrainArgs {
        dry_run: false,
        config: None,
        settings: Settings { resume: Some(cut.out.clone()), ..Settings::default() },
    };
    let again =
        train(&TrainConfig::from_args(&args).unwrap(), &AtomicBool::new(false), &mut Memory::default()).unwrap();
    let (whole_adapter, adapter) = (adapter::load(&whole.out).unwrap(), adapter::load(&again.out).unwrap());
    assert_eq!(values(&adapter.weights), values(&whole_adapter.weights));

    let (_, merged) = folder::load(&whole.out).unwrap();
    let (_, base) = folder::load(&root.join("tiny")).unwrap();
    let expected = adapter.lora.merge(base.into_iter().chain(adapter.weights).collect()).unwrap();
    near("merged", &merged, &expected, 1e-7);
}

/// A new run continues the training of an adapter on the same model, on any mesh, and saves it as an adapter of that model.
#[test]
fn an_adapter_is_trained_on_by_a_new_run() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    text(root);
    let targets = Some("q_proj,v_proj,o_proj,up_proj,down_proj".to_owned());
    let (first, _) = run(Settings { lora_alpha: Some(12.0), lora_targets: targets, ..settings(root, "first") });
    let began = adapter::load(&first.out).unwrap();
    let on = |name: &str| Settings { model: Some(first.out.clone()), lora_rank: None, ..settings(root, name) };

    // A step with a learning rate of 0 changes nothing.
    let (same, memory) = run(Settings { lr: Some(0.0), steps: Some(1), ..on("same") });
    let kept = adapter::load(&same.out).unwrap();
    assert_eq!((&kept.lora, &kept.base, values(&kept.weights)), (&began.lora, &began.base, values(&began.weights)));
    assert_eq!(same.base_model, Some(root.join("tiny").canonicalize().unwrap()));
    // The first loss is that of the merged model, whether the adapter or the merged model is trained.
    let whole = Settings { merge_adapter: Some(true), lr: Some(0.0), steps: Some(1), ..on("whole") };
    let (merged, of_merged) = run(whole);
    assert!((memory.steps[0].loss - of_merged.steps[0].loss).abs() < 1e-5);
    assert!(folder::load(&merged.out).is_ok(), "a model of its own");

    let (second, expected) = run(on("second"));
    assert!(expected.steps[5].loss < expected.steps[0].loss, "{:?}", expected.losses());
    let trained = adapter::load(&second.out).unwrap();
    assert_eq!((&trained.lora, &trained.base), (&began.lora, &began.base));
    let mesh = Settings { dp_shard: Some(2), ring: Some(2), tp: Some(2), ..Settings::default() };
    let (many, memory) = run(mesh.overriding(&on("mesh")).unwrap());
    for (a, b) in memory.losses().iter().zip(expected.losses()) {
        assert!((a - b).abs() <= 1e-5 * b, "{a} is not {b}");
    }
    near("mesh", &adapter::load(&many.out).unwrap().weights, &trained.weights, 1e-4);

    // A resumed run goes on from its own checkpoint, not from the adapter that it began with.
    std::fs::remove_dir_all(second.out.join("checkpoints/step-000006")).unwrap();
    let resumed = Settings { resume: Some(second.out.clone()), ..Settings::default() };
    let args = TrainArgs { dry_run: false, config: None, settings: resumed };
    let again =
        train(&TrainConfig::from_args(&args).unwrap(), &AtomicBool::new(false), &mut Memory::default()).unwrap();
    assert_eq!(values(&adapter::load(&again.out).unwrap().weights), values(&trained.weights));

    // Settings that contradict the adapter in the folder are refused.
    let refused = |change: Settings, words: &[&str]| {
        let message = TrainConfig::resolve(change.overriding(&on("refused")).unwrap()).unwrap_err().to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    };
    refused(Settings { lora_rank: Some(8), ..Settings::default() }, &["--lora-rank 8", "rank 4", "--merge-adapter"]);
    refused(Settings { lora_alpha: Some(2.5), ..Settings::default() }, &["--lora-alpha 2.5", "alpha 12"]);
    let other = Settings { lora_targets: Some("q_proj".into()), ..Settings::default() };
    refused(other, &["--lora-targets q_proj", "q_proj, v_proj, o_proj, up_proj, down_proj"]);
    let both = Settings { lora_rank: Some(4), merge_adapter: Some(true), ..Settings::default() };
    refused(both, &["--lora-rank", "--merge-adapter"]);
    let no_adapter = Settings { merge_adapter: Some(true), model: Some(root.join("tiny")), ..Settings::default() };
    refused(no_adapter, &["--merge-adapter has no effect", "no adapter"]);
    let said = Settings {
        lora_rank: Some(4),
        lora_alpha: Some(12.0),
        lora_targets: Some("down_proj, q_proj,v_proj,o_proj,up_proj".into()),
        lora_dropout: Some(0.2),
        ..Settings::default()
    };
    let config = TrainConfig::resolve(said.overriding(&on("said")).unwrap()).unwrap();
    assert_eq!(config.lora.map(|lora| lora.dropout), Some(0.2));
    let path = first.out.join(adapter::CONFIG);
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"init_lora_weights\": true", "\"init_lora_weights\": \"mica\"")).unwrap();
    refused(Settings::default(), &["cannot be trained on", "mica"]);
}

#[test]
fn the_plan_says_first_what_is_trained() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    text(root);
    let first_line = |settings: Settings| {
        let plan = ringspan_train::plan(&TrainConfig::resolve(settings).unwrap()).unwrap().to_string();
        plan.lines().next().unwrap_or_default().to_owned()
    };
    let all = folder::load(&root.join("tiny")).unwrap().1.values().map(|tensor| tensor.elem_count()).sum::<usize>();
    let all = format!("{},{:03}", all / 1000, all % 1000);
    let (adapter, _) = run(settings(root, "adapter"));
    let on = Settings { model: Some(adapter.out), lora_rank: None, ..settings(root, "on") };
    let merging = Settings { merge_adapter: Some(true), ..on.clone() };
    let whole = Settings { lora_rank: None, ..settings(root, "whole") };
    let new = Settings { model: None, lora_rank: None, ..settings(root, "new") };
    for (settings, words) in [
        (settings(root, "lora"), &["training   a new LoRA adapter of rank 4, 4,096 of ", "alpha 8", "q_proj"][..]),
        (on, &["training   a LoRA adapter, continued, of rank 4, 4,096 of "]),
        (merging, &["training   full fine-tuning of ", &all, "merged"]),
        (whole, &["training   full fine-tuning of ", &all]),
        (new, &["training   a new model, all of its "]),
    ] {
        let line = first_line(settings);
        assert!(words.iter().all(|word| line.contains(word)), "{line}: {words:?}");
    }
}
