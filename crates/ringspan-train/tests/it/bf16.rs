//! Training in bf16 on CPUs learns nearly the same as in f32, on every mesh; a resumed run may change the type and the mesh.

use crate::common::{Memory, run, sparse, stacked, text, tiny_model};
use ringspan_train::{Settings, TrainArgs, TrainConfig, train};
use std::path::Path;
use std::sync::atomic::AtomicBool;

fn settings(root: &Path, name: &str, dtype: &str) -> Settings {
    Settings {
        model: Some(root.join("tiny")),
        data: Some(vec![root.join("text.jsonl")]),
        out: Some(root.join(name)),
        dtype: Some(dtype.into()),
        sequence_length: Some(64),
        batch_size: Some(4),
        steps: Some(10),
        lr: Some(1e-2),
        sample_tokens: Some(0),
        threads: Some(1),
        ..Settings::default()
    }
}

/// Trains in f32 on one rank, and in bf16 on each mesh; asserts that no loss is off from that of f32 by more than `bound` of it.
#[track_caller]
fn stay_close(root: &Path, what: &str, bound: f64, change: &Settings, meshes: &[(&str, Settings)]) {
    let settings = |name: &str, dtype: &str| {
        let Settings { lora_rank, lora_dropout, .. } = change.clone();
        Settings { lora_rank, lora_dropout, ..settings(root, &format!("{what}{name}"), dtype) }
    };
    let losses = |settings: Settings| run(settings).1.losses();
    let whole = losses(Settings { ring: Some(1), ..settings("whole", "f32") });
    assert!(whole[0] - whole[9] > 0.2, "it learns: {whole:?}");
    for (name, mesh) in meshes {
        let given = settings(name, "bf16");
        let Settings { ring, ulysses, tp, ep, dp_shard, recompute, .. } = mesh.clone();
        let rounded = losses(Settings { ring, ulysses, tp, ep, dp_shard, recompute, ..given });
        let off = rounded.iter().zip(&whole).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
        println!("{name}: losses are off by {off:.1e}");
        assert!(off > 1e-6, "{name}: nothing was computed in bf16: {rounded:?}");
        assert!(off < bound, "{name}: losses are off by {off:.1e}: {rounded:?}, {whole:?}");
    }
}

fn mesh(ring: usize, ulysses: usize, tp: usize, recompute: &str) -> Settings {
    Settings {
        ring: Some(ring),
        ulysses: Some(ulysses),
        tp: Some(tp),
        recompute: Some(recompute.into()),
        ..Settings::default()
    }
}

/// Losses differ by the rounding of the forward pass, and by what ten steps of gradients that are off by a hundredth do to
/// weights.
#[test]
fn losses_stay_close_on_every_mesh_and_a_run_goes_on_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    text(root);
    let meshes = [
        ("one", mesh(1, 1, 1, "nothing")),
        ("ring", mesh(4, 1, 1, "keep-attention")),
        ("grid", mesh(2, 2, 1, "full")),
        ("shared layers", mesh(1, 1, 2, "nothing")),
        ("copies", Settings { dp_shard: Some(2), ..mesh(1, 1, 2, "keep-attention") }),
    ];
    stay_close(root, "", 5e-3, &Settings::default(), &meshes);
    let adapters = Settings { lora_rank: Some(4), lora_dropout: Some(0.1), ..Settings::default() };
    stay_close(root, "adapters, ", 5e-3, &adapters, &meshes[..4]);
    // Checkpoints are f32, so another mesh can go on with them in either type.
    for (dtype, ring, tp) in [("bf16", 2, 2), ("f32", 1, 1)] {
        let args = TrainArgs {
            dry_run: false,
            config: None,
            settings: Settings {
                resume: Some(root.join("ring")),
                steps: Some(if dtype == "bf16" { 12 } else { 14 }),
                dtype: Some(dtype.into()),
                ring: Some(ring),
                tp: Some(tp),
                ..Settings::default()
            },
        };
        let mut memory = Memory::default();
        train(&TrainConfig::from_args(&args).unwrap(), &AtomicBool::new(false), &mut memory).unwrap();
        assert_eq!(memory.steps.len(), 2, "{dtype}");
        assert_eq!(memory.plan.mesh.contains("in bf16"), dtype == "bf16", "{}", memory.plan.mesh);
    }
}

/// Recomputed activations give the gradients of stored ones, to the bit: both are rounded alike.
#[test]
fn recomputation_changes_no_loss() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    text(root);
    let losses = |recompute: &str| {
        let one = Settings {
            ring: Some(1),
            steps: Some(4),
            recompute: Some(recompute.into()),
            ..settings(root, recompute, "bf16")
        };
        run(one).1.losses()
    };
    let kept = losses("nothing");
    assert_eq!(losses("full"), kept);
    assert_eq!(losses("keep-attention"), kept);
}

/// Routers compute in f32, but from activations in bf16: near a tie, a token may go to another expert than in f32.
#[test]
fn losses_of_sparse_models_stay_close_on_every_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let model = tiny_model(root);
    text(root);
    let meshes = [
        ("one", mesh(1, 1, 1, "nothing")),
        ("distributed", Settings { ep: Some(2), ..mesh(2, 1, 2, "nothing") }),
        ("ring", mesh(4, 1, 1, "keep-attention")),
    ];
    sparse(&model);
    stay_close(root, "", 2e-2, &Settings::default(), &meshes);
    let adapters = Settings { lora_rank: Some(4), ..Settings::default() };
    stay_close(root, "adapters, ", 2e-2, &adapters, &meshes[..2]);
    stacked(&model);
    stay_close(root, "stacked, ", 2e-2, &Settings::default(), &meshes);
}
