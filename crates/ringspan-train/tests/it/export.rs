//! A model folder can be exported from any checkpoint of a run.

use crate::common::{Memory, of_tiny_model, run, text, tiny_model};
use ringspan_models::folder::{self, SavedType};
use ringspan_train::{Settings, TrainConfig, export, train};
use std::{fs, path::Path, sync::atomic::AtomicBool};

fn settings(root: &Path, name: &str) -> Settings {
    Settings {
        ring: Some(2),
        dp_shard: Some(2),
        steps: Some(6),
        lr: Some(1e-2),
        save_every: Some(3),
        ..of_tiny_model(root, name)
    }
}

#[test]
fn a_checkpoint_becomes_the_folder_that_the_run_would_have_made() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    text(root);
    for (name, more) in [("plain", Settings::default()), ("adapters", lora(false)), ("merged", lora(true))] {
        let all = Settings { lora_rank: more.lora_rank, lora_merge: more.lora_merge, ..settings(root, name) };
        let (outcome, _) = run(all);
        let again = root.join(format!("{name}-again"));
        let done = export(&outcome.out, None, Some(&again), None).unwrap();
        assert_eq!((done.step, &done.out), (6, &again));
        let mut compared = 0;
        for entry in fs::read_dir(&again).unwrap() {
            let file = entry.unwrap().file_name();
            let [one, other] = [&again, &outcome.out].map(|folder| fs::read(folder.join(&file)).unwrap());
            assert!(one == other, "{name}: {}", file.display());
            compared += 1;
        }
        assert!(compared >= 3, "{name}: {compared} files");
        let message = export(&outcome.out, None, Some(&again), None).unwrap_err().to_string();
        assert!(message.contains("already holds") && message.contains("--out"), "{message}");
    }
}

fn lora(merge: bool) -> Settings {
    Settings { lora_rank: Some(4), lora_merge: merge.then_some(true), ..Settings::default() }
}

#[test]
fn a_stopped_run_has_a_model_of_each_of_its_checkpoints() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    text(root);
    let stop = AtomicBool::new(false);
    let mut memory = Memory { stop_after: Some((4, &stop)), ..Memory::default() };
    let config = TrainConfig::resolve(settings(root, "cut")).unwrap();
    assert!(train(&config, &stop, &mut memory).unwrap().interrupted);
    // The newest checkpoint is exported to the run's own folder, as at its end, and another step's, rounded, elsewhere.
    assert_eq!(export(&config.out, None, None, None).unwrap().step, 4);
    let other = root.join("three");
    assert_eq!(export(&config.out, Some(3), Some(&other), Some(SavedType::Bf16)).unwrap().step, 3);
    assert_eq!(SavedType::of(&folder::config_json(&other).unwrap()), SavedType::Bf16);
    let (newest, older) = (folder::load(&config.out).unwrap().1, folder::load(&other).unwrap().1);
    let far = |name: &String| {
        let values =
            |weights: &ringspan_candle::Weights| weights[name].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (a, b) = (values(&newest), values(&older));
        a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    };
    assert!(newest.keys().any(|name| far(name) > 1e-3), "step 4 is not step 3");
    let message = export(&config.out, Some(5), None, None).unwrap_err().to_string();
    assert!(message.contains("step 5") && message.contains("3, 4"), "{message}");
    let message = export(root, None, None, None).unwrap_err().to_string();
    assert!(message.contains("no run in this folder"), "{message}");
}
