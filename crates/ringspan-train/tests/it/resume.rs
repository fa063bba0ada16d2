//! A run that was interrupted and resumed equals one that was not.

use crate::common::{Memory, of_tiny_model, run, text, tiny_model};
use ringspan_train::{Settings, TrainArgs, TrainConfig, train};
use std::{fs, path::Path, sync::atomic::AtomicBool};

fn settings(root: &Path, name: &str) -> Settings {
    Settings {
        batch_size: Some(2),
        ring: Some(2),
        steps: Some(8),
        lr: Some(1e-2),
        save_every: Some(3),
        grad_accumulation: Some(2),
        ..of_tiny_model(root, name)
    }
}

fn resumed(out: &Path, given: Settings) -> Result<(ringspan_train::Outcome, Memory<'static>), ringspan_train::Error> {
    let args = TrainArgs { dry_run: false, config: None, settings: Settings { resume: Some(out.into()), ..given } };
    let mut memory = Memory::default();
    let outcome = train(&TrainConfig::from_args(&args)?, &AtomicBool::new(false), &mut memory)?;
    Ok((outcome, memory))
}

fn losses_on_disk(out: &Path) -> Vec<(u64, u64)> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
    lines.filter_map(|l| Some((l["step"].as_u64()?, l["loss"].as_f64()?.to_bits()))).collect()
}

#[test]
fn losses_and_the_final_model_are_the_same_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    text(root);
    let (whole, _) = run(settings(root, "whole"));
    let (cut, _) = run(settings(root, "cut"));
    assert_eq!(losses_on_disk(&whole.out), losses_on_disk(&cut.out), "the same run twice gives the same bits");

    // This is as if the power had failed after step 7: the newest checkpoint is that of step 6.
    fs::remove_dir_all(cut.out.join("checkpoints/step-000008")).unwrap();
    fs::remove_file(cut.out.join("model.safetensors")).unwrap();
    let (again, memory) = resumed(&cut.out, Settings::default()).unwrap();
    assert_eq!(memory.steps.iter().map(|m| m.step).collect::<Vec<_>>(), [7, 8]);
    assert_eq!(again.step, 8);
    assert_eq!(losses_on_disk(&again.out), losses_on_disk(&whole.out));
    for file in ["model.safetensors", "config.json", "tokenizer.json"] {
        assert_eq!(fs::read(again.out.join(file)).unwrap(), fs::read(whole.out.join(file)).unwrap(), "{file}");
    }
}

#[test]
fn a_stopped_run_saves_its_step_and_goes_on_where_it_stood() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    text(root);
    let (whole, _) = run(settings(root, "whole"));
    let stop = AtomicBool::new(false);
    let mut memory = Memory { stop_after: Some((4, &stop)), ..Memory::default() };
    let outcome = train(&TrainConfig::resolve(settings(root, "cut")).unwrap(), &stop, &mut memory).unwrap();
    assert!(outcome.interrupted && outcome.step == 4);
    assert!(outcome.out.join("checkpoints/step-000004").exists());
    assert!(!outcome.out.join("model.safetensors").exists(), "a stopped run has no trained model yet");
    let (again, _) = resumed(&outcome.out, Settings::default()).unwrap();
    assert!(!again.interrupted);
    assert_eq!(losses_on_disk(&again.out), losses_on_disk(&whole.out));
    let message = resumed(&outcome.out, Settings::default()).unwrap_err().to_string();
    assert!(message.contains("8 of 8 steps") && message.contains("--steps"), "{message}");
    assert_eq!(resumed(&outcome.out, Settings { steps: Some(9), ..Settings::default() }).unwrap().0.step, 9);
}

#[test]
fn any_mesh_goes_on_from_the_checkpoint_of_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    text(root);
    let mesh = |dp_replicate, dp_shard, ring, ulysses, tp| Settings {
        dp_replicate: Some(dp_replicate),
        dp_shard: Some(dp_shard),
        ring: Some(ring),
        ulysses: Some(ulysses),
        tp: Some(tp),
        sharding: Some("full".into()),
        ..Settings::default()
    };
    let whole = Settings { sharding: Some("none".into()), ..mesh(1, 1, 2, 1, 2) };
    let meshes = [
        mesh(1, 1, 1, 1, 1),
        mesh(1, 2, 2, 1, 1),
        mesh(1, 1, 2, 1, 2),
        whole,
        mesh(1, 1, 4, 1, 1),
        mesh(2, 1, 1, 3, 1),
        mesh(1, 1, 1, 1, 4),
    ];
    each_goes_on_from_each(root, &meshes, 4);
}

#[test]
fn any_mesh_of_experts_goes_on_from_the_checkpoint_of_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    crate::common::sparse(&tiny_model(root));
    text(root);
    let mesh = |dp_shard, tp, ep, moe_dp| Settings {
        ring: Some(2),
        dp_shard: Some(dp_shard),
        tp: Some(tp),
        ep: Some(ep),
        moe_dp: Some(moe_dp),
        ..Settings::default()
    };
    let meshes = [mesh(2, 2, 2, 2), mesh(1, 1, 1, 2), mesh(1, 1, 2, 1), mesh(1, 2, 1, 1)];
    each_goes_on_from_each(root, &meshes, meshes.len());
}

#[test]
fn families_whose_layers_are_their_own_go_on_on_any_mesh() {
    let mesh = |dp_shard, ring, tp, ep| Settings {
        ring: Some(ring),
        dp_shard: Some(dp_shard),
        tp: Some(tp),
        ep: Some(ep),
        ..Settings::default()
    };
    let meshes = [mesh(2, 2, 1, 1), mesh(1, 2, 2, 2), mesh(1, 1, 1, 1)];
    for make in [crate::common::latent, crate::common::stacked] {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        make(&tiny_model(root));
        text(root);
        each_goes_on_from_each(root, &meshes, 2);
        let (_, weights) = ringspan_models::folder::load(&root.join("from-1")).unwrap();
        if let Some(correction) = weights.get(crate::common::CORRECTED) {
            assert_eq!(correction.to_vec1::<f32>().unwrap(), crate::common::CORRECTION);
        }
    }
}

/// Runs on each of the first meshes, and resumes each run on every mesh.
#[track_caller]
fn each_goes_on_from_each(root: &Path, meshes: &[Settings], first: usize) {
    for (from, saved) in meshes[..first].iter().enumerate() {
        let settings = settings(root, &format!("from-{from}"));
        let (whole, memory) = run(saved.overriding(&settings).unwrap());
        fs::remove_dir_all(whole.out.join("checkpoints/step-000008")).unwrap();
        for (to, mesh) in meshes.iter().enumerate() {
            let (_, again) = resumed(&whole.out, mesh.clone()).unwrap();
            for (a, b) in again.steps.iter().zip(&memory.steps[6..]) {
                let same = if from == to { a.loss == b.loss } else { (a.loss - b.loss).abs() <= 1e-6 * b.loss };
                assert!(same, "{from} to {to}, step {}: {} is not {}", a.step, a.loss, b.loss);
            }
            fs::remove_dir_all(whole.out.join("checkpoints/step-000008")).unwrap();
        }
    }
}

#[test]
fn a_run_does_not_go_on_with_another_model_or_over_other_text() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let model = tiny_model(root);
    let data = text(root);
    let (whole, _) = run(settings(root, "whole"));
    let more = || Settings { steps: Some(9), ..Settings::default() };

    let lines = fs::read_to_string(&data).unwrap();
    fs::write(&data, format!("{lines}\n{{\"text\":\"one more\"}}")).unwrap();
    let message = resumed(&whole.out, more()).unwrap_err().to_string();
    assert!(message.contains("40 documents") && message.contains("41 documents"), "{message}");
    fs::write(&data, lines).unwrap();

    let mut wide = crate::common::tiny_config();
    wide["intermediate_size"] = 96.into();
    let decoder =
        ringspan_models::Decoder::new(serde_json::from_value::<ringspan_models::Config>(wide.clone()).unwrap())
            .unwrap();
    ringspan_models::folder::save(&model, &wide, &decoder.init(3).unwrap()).unwrap();
    let message = resumed(&whole.out, more()).unwrap_err().to_string();
    assert!(message.contains("another model") && message.matches("parameters").count() == 2, "{message}");
}

/// Names and shapes stay the same, but each step would compute something else.
#[test]
fn a_run_does_not_go_on_under_a_changed_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let file = tiny_model(root).join("config.json");
    text(root);
    let given = settings(root, "given");
    let new = Settings { model: None, model_config: Some(file.clone()), ..settings(root, "new") };
    for settings in [given, new] {
        let short = Settings { steps: Some(1), warmup: Some(0), ..settings };
        let (whole, _) = run(short);
        let more = |steps| Settings { steps: Some(steps), ..Settings::default() };
        let text = fs::read_to_string(&file).unwrap();
        let with = |key: &str, value: serde_json::Value| {
            let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
            json[key] = value;
            fs::write(&file, json.to_string()).unwrap();
        };
        for (key, value, before) in [
            ("rope_theta", 500_000.0.into(), "was 10000.0, now 500000.0"),
            ("rms_norm_eps", 1e-6.into(), "was 0.00001, now 1e-6"),
            ("rope_scaling", serde_json::json!({"rope_type": "linear", "factor": 2.0}), "was absent, now {"),
        ] {
            with(key, value);
            let message = resumed(&whole.out, more(2)).unwrap_err().to_string();
            for word in ["another model", "tiny", key, before, "change it back"] {
                assert!(message.contains(word), "`{word}` is not in: {message}");
            }
            assert!(!message.contains("hidden_size"), "{message}");
        }
        // This key does not affect computation.
        fs::write(&file, &text).unwrap();
        with("mine", "a word".into());
        let (_, memory) = resumed(&whole.out, more(2)).unwrap();
        assert_eq!(memory.steps.len(), 1);
        // A checkpoint without a configuration, as older versions wrote it, is resumed without this check.
        let state = whole.out.join("checkpoints/step-000002/state.json");
        let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&state).unwrap()).unwrap();
        assert!(json.as_object_mut().unwrap().remove("config").is_some());
        fs::write(&state, json.to_string()).unwrap();
        with("rope_theta", 500_000.0.into());
        assert_eq!(resumed(&whole.out, more(3)).unwrap().0.step, 3);
        fs::write(&file, text).unwrap();
    }
}

/// A watchdog without saved statistics would compare nothing for ten steps.
#[test]
fn a_spike_right_after_a_resume_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    text(root);
    let calm = Settings { optimizer: Some("sgd".into()), lr: Some(1e-6), steps: Some(12), ..settings(root, "calm") };
    let (calm, _) = run(calm);
    let state = calm.out.join("checkpoints/step-000012/state.json");
    let json: serde_json::Value = serde_json::from_slice(&fs::read(&state).unwrap()).unwrap();
    let losses: Vec<f64> = losses_on_disk(&calm.out).into_iter().map(|(_, bits)| f64::from_bits(bits)).collect();
    let mean = losses.iter().sum::<f64>() / 12.0;
    assert!((json["losses"]["mean"].as_f64().unwrap() - mean).abs() < 1e-9, "{}", json["losses"]);
    let wild = |spike_factor| Settings {
        lr: Some(20.0),
        schedule: Some("constant".into()),
        steps: Some(20),
        spike_factor: Some(spike_factor),
        spike_steps: Some(2),
        ..Settings::default()
    };
    let message = resumed(&calm.out, wild(2.0)).unwrap_err().to_string();
    assert!(message.contains("above 2 times its mean") && message.contains("2 steps in a row"), "{message}");
    let steps = losses_on_disk(&calm.out).len();
    assert!((14..=16).contains(&steps), "noticed after step {steps}");

    // A checkpoint without losses, as older versions wrote it, is read with empty statistics: the same run is not stopped.
    fs::remove_dir_all(calm.out.join(format!("checkpoints/step-{steps:06}"))).unwrap();
    let mut json = json;
    json.as_object_mut().unwrap().remove("losses");
    fs::write(&state, json.to_string()).unwrap();
    let (outcome, _) = resumed(&calm.out, wild(2.0)).unwrap();
    assert_eq!(outcome.step, 20);
}

#[test]
fn balanced_packing_and_conversations_go_on_where_they_stood() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    let (data, template) = crate::common::conversations(root);
    let settings = |name: &str| Settings {
        data: Some(vec![data.clone()]),
        chat_template: Some(template.clone()),
        packing: Some("balanced".into()),
        ..settings(root, name)
    };
    let (whole, _) = run(settings("whole"));
    let (cut, _) = run(settings("cut"));
    for (name, from) in [("chat_template.jinja", &template), ("tokenizer.json", &root.join("tiny/tokenizer.json"))] {
        assert!(whole.out.join(name).exists() && from.exists(), "{name}");
    }
    assert_eq!(fs::read(whole.out.join("chat_template.jinja")).unwrap(), fs::read(&template).unwrap());
    fs::remove_dir_all(cut.out.join("checkpoints/step-000008")).unwrap();
    let (again, memory) = resumed(&cut.out, Settings::default()).unwrap();
    assert_eq!(memory.steps.len(), 2);
    assert_eq!(losses_on_disk(&again.out), losses_on_disk(&whole.out));
    let message = resumed(&cut.out, Settings { packing: Some("in-order".into()), ..Settings::default() });
    assert!(message.unwrap_err().to_string().contains("--packing cannot change"));
    // Another chat template makes other tokens.
    let source = fs::read_to_string(&template).unwrap();
    fs::write(&template, source.replace("endoftext|>{% endfor", "endoftext|>.{% endfor")).unwrap();
    let message = resumed(&cut.out, Settings { steps: Some(9), ..Settings::default() }).unwrap_err().to_string();
    assert!(message.contains("another data"), "{message}");
}

/// A step whose loss or gradient is not finite is noticed before anything is updated, so the state before it is worth saving.
#[test]
fn a_run_that_diverges_keeps_the_steps_before() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    text(root);
    for (name, save_every) in [("never", 0), ("always", 1)] {
        let wild = Settings {
            optimizer: Some("sgd".into()),
            lr: Some(1e30),
            warmup: Some(0),
            save_every: Some(save_every),
            ..settings(root, name)
        };
        let config = TrainConfig::resolve(wild).unwrap();
        let error = train(&config, &AtomicBool::new(false), &mut Memory::default()).unwrap_err();
        assert!(matches!(error, ringspan_train::Error::Diverged { step: 2, .. }), "{error}");
        for word in ["step 2", "norm", "--resume"] {
            assert!(error.to_string().contains(word), "{error}");
        }
        assert!(config.out.join("checkpoints/step-000001/state.json").exists(), "{name}");
        // The checkpoint is read, and the next step diverges again: its parameters are too far off.
        let again = resumed(&config.out, Settings { lr: Some(1e-3), ..Settings::default() }).unwrap_err();
        assert!(matches!(again, ringspan_train::Error::Diverged { step: 2, .. }), "{again}");
    }
}

/// Defaults that follow from other settings keep their values when those settings change.
#[test]
fn a_resumed_run_keeps_its_batches_and_tells_of_other_learning_rates() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    text(root);
    let begun = Settings { batch_size: None, dp_shard: Some(2), ring: None, ..settings(root, "run") };
    let (outcome, first) = run(begun);
    let given = Settings { dp_shard: Some(1), ring: Some(2), steps: Some(40), ..Settings::default() };
    let args =
        TrainArgs { settings: Settings { resume: Some(outcome.out.clone()), ..given.clone() }, ..TrainArgs::default() };
    let plan = ringspan_train::plan(&TrainConfig::from_args(&args).unwrap()).unwrap();
    for word in ["begun", "8 steps", "step 9", "0.000e0"] {
        assert!(plan.optimizer.contains(word), "'{word}' is not in: {}", plan.optimizer);
    }
    let (_, memory) = resumed(&outcome.out, Settings { steps: Some(9), ..given }).unwrap();
    let of_step = first.steps[0].tokens;
    assert_eq!(memory.steps[0].tokens - first.steps.last().unwrap().tokens, of_step, "tokens of a step");
    let same = TrainArgs {
        settings: Settings { resume: Some(outcome.out), steps: Some(9), ..Settings::default() },
        ..TrainArgs::default()
    };
    assert_eq!(TrainConfig::from_args(&same).unwrap().warmup, Some(0), "a tenth of 8 steps, not of 40");
    // A run that is made shorter than its warm-up still ends.
    let (longer, _) = run(Settings { warmup: Some(6), ..settings(root, "longer") });
    let shorter = TrainArgs {
        settings: Settings { resume: Some(longer.out), steps: Some(4), ..Settings::default() },
        ..TrainArgs::default()
    };
    assert_eq!(TrainConfig::from_args(&shorter).unwrap().warmup, Some(3));
}
