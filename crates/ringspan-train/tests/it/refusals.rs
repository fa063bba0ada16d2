//! Settings that cannot be trained are refused before anything is computed or written, with the numbers.

use crate::common::{Memory, sparse, text, tiny_model};
use ringspan_train::{Settings, TrainConfig, train};
use safetensors::{Dtype, tensor::TensorView};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

fn tokens(root: &Path, values: &[u32]) -> PathBuf {
    let path = root.join("tokens.safetensors");
    let bytes: Vec<u8> = values.iter().flat_map(|t| t.to_le_bytes()).collect();
    let view = TensorView::new(Dtype::U32, vec![1, values.len()], &bytes).unwrap();
    safetensors::serialize_to_file([("tokens", view)], None, &path).unwrap();
    path
}

#[track_caller]
fn refused(root: &Path, settings: Settings, expected: &[&str]) {
    let out = root.join("out");
    let settings = Settings { out: Some(out.clone()), ..settings };
    let config = TrainConfig::resolve(settings).unwrap();
    let message = train(&config, &AtomicBool::new(false), &mut Memory::default()).unwrap_err().to_string();
    for part in expected {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
    assert!(!out.exists(), "nothing may be written");
}

#[test]
fn models_data_and_meshes_that_do_not_fit_are_refused_and_nothing_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let model = tiny_model(root);
    let data = text(root);
    let with = |model: &Path, data: &Path| Settings {
        model: Some(model.into()),
        data: Some(vec![data.into()]),
        sequence_length: Some(64),
        ..Settings::default()
    };

    refused(root, with(&root.join("nowhere"), &data), &["nowhere"]);
    refused(root, with(&model, &root.join("nothing.txt")), &["nothing.txt"]);
    refused(root, Settings { ulysses: Some(8), ..with(&model, &data) }, &["8", "4"]);
    refused(root, Settings { tp: Some(5), ..with(&model, &data) }, &["5 ranks cannot share 4 query heads"]);
    refused(
        root,
        Settings { tp: Some(2), ulysses: Some(3), ..with(&model, &data) },
        &["--ulysses 3", "--tp 2", "4 query heads"],
    );
    refused(root, Settings { ring: Some(4), ep: Some(2), ..with(&model, &data) }, &["--ep 2", "llama has none"]);
    let dense = fs::read(model.join("config.json")).unwrap();
    let weights = fs::read(model.join("model.safetensors")).unwrap();
    sparse(&model);
    let ready = |ep, moe_dp| Settings { ring: Some(3), dp_replicate: Some(2), ep, moe_dp, ..with(&model, &data) };
    refused(root, ready(Some(4), None), &["--ep 4 x --tp 1 does not divide the 6 ranks"]);
    refused(root, ready(Some(3), Some(1)), &["ep 3 x moe_tp 2", "the 3 ranks of a copy"]);
    refused(root, ready(Some(2), Some(4)), &["ep 2", "moe_dp 4", "6"]);
    fs::write(model.join("config.json"), dense).unwrap();
    fs::write(model.join("model.safetensors"), weights).unwrap();
    let tokens = tokens(root, &[1, 2, 999]);
    let ready = Settings { model: Some(model.clone()), tokens: Some(tokens), ..Settings::default() };
    refused(root, ready, &["[0, 2] is 999", "0 to 256"]);

    fs::rename(model.join("tokenizer.json"), model.join("t")).unwrap();
    refused(root, with(&model, &data), &["tokenizer.json", "is missing"]);
    fs::write(model.join("tokenizer.model"), "\n").unwrap();
    refused(root, with(&model, &data), &["tokenizer.json", "tokenizer.model next to it", "save_pretrained"]);
    fs::write(model.join("tokenizer.json"), "{").unwrap();
    refused(root, with(&model, &data), &["tokenizer.json"]);
    fs::rename(model.join("t"), model.join("tokenizer.json")).unwrap();

    let weights = fs::read(model.join("model.safetensors")).unwrap();
    fs::write(model.join("model.safetensors"), &weights[..weights.len() / 2]).unwrap();
    refused(root, with(&model, &data), &["model.safetensors"]);
}

#[test]
fn a_loss_that_is_no_number_stops_the_run_and_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let settings = Settings {
        model: Some(tiny_model(root)),
        data: Some(vec![text(root)]),
        out: Some(root.join("out")),
        sequence_length: Some(64),
        optimizer: Some("sgd".into()),
        lr: Some(1e30),
        warmup: Some(0),
        grad_clip: Some(0.0),
        steps: Some(5),
        ..Settings::default()
    };
    let config = TrainConfig::resolve(settings).unwrap();
    let message = train(&config, &AtomicBool::new(false), &mut Memory::default()).unwrap_err().to_string();
    assert!(message.contains("--lr") && message.contains("step 2"), "{message}");
}

#[test]
fn a_loss_that_stays_high_stops_every_rank_with_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let settings = Settings {
        model: Some(tiny_model(root)),
        data: Some(vec![text(root)]),
        out: Some(root.join("out")),
        tensorboard: Some(root.join("events")),
        sequence_length: Some(64),
        ring: Some(2),
        optimizer: Some("sgd".into()),
        // The model learns nothing, so losses go up and down with the text.
        lr: Some(1e-9),
        spike_factor: Some(1.0001),
        spike_steps: Some(1),
        steps: Some(60),
        ..Settings::default()
    };
    let config = TrainConfig::resolve(settings).unwrap();
    let mut memory = Memory::default();
    let message = train(&config, &AtomicBool::new(false), &mut memory).unwrap_err().to_string();
    let last = memory.steps.last().unwrap().step;
    assert!(message.contains("above 1.0001 times its mean") && message.contains(&format!("step {last}")), "{message}");
    assert!((11..60).contains(&last), "{message}");
    assert!(root.join(format!("out/checkpoints/step-{last:06}/state.json")).exists());
    assert_eq!(fs::read_dir(root.join("events")).unwrap().count(), 1);
}
