//! The loss of flow matching and the gradients of adapters, against PyTorch.

use crate::support::{distance, fixture, message, on_ranks};
use candle_core::{Device, Tensor};
use ringspan::comm::process_group::ProcessGroup;
use ringspan_candle::gradients::loss_and_gradients;
use ringspan_candle::model::UnitWeights;
use ringspan_candle::{Recompute, Weights};
use ringspan_models::Lora;
use ringspan_train::{Optimizer, OptimizerConfig, Settings, TrainArgs, TrainConfig};
use ringspan_video::Result;
use ringspan_video::lora::LoraSource;
use ringspan_video::ranks::{VideoMesh, VideoRanks};
use ringspan_video::training::{AdapterTrainer, StepSettings, VideoTraining};
use ringspan_video::transformer::{FlowBatch, FlowSample, TokenGrid, VideoContext, WanFolder, WeightType};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

fn training(name: &str) -> PathBuf {
    fixture("../training").join(name)
}

fn load(name: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(training(name), &Device::Cpu).expect("a fixture")
}

fn sample(data: &HashMap<String, Tensor>) -> Result<FlowSample> {
    let timesteps = data["timesteps"].to_vec1::<f32>()?;
    FlowSample::new(&data["latents"], &data["noise"], &timesteps, &data["prompt_embeds"])
}

/// The factor of the adapters of the fixture, alpha / r. The matrices B of a folder have it, so their gradients are smaller by it.
const FACTOR: f64 = 2.0;

/// The loss and all gradients of the fixture's first step, summed over the ranks of a mesh.
fn first_step(mesh: (usize, usize), of: WeightType, recompute: Recompute) -> Result<(f64, Weights)> {
    let initial = LoraSource { path: training("initial"), scale: 1.0 };
    let folder = WanFolder::open(&fixture("t2v"))?.with_loras(&[initial])?;
    let (transformer, weights, sample) = (folder.transformer(), folder.load(of)?, sample(&load("data.safetensors"))?);
    let (batch, size) = (sample.shape()[0], [sample.shape()[2], sample.shape()[3], sample.shape()[4]]);
    let parts = on_ranks(mesh, |group, alone| {
        let grid = TokenGrid::new(size, transformer.config().patch_size)?;
        let video = VideoContext::new(transformer.config(), group, alone, batch, grid)?;
        let mut all = Weights::new();
        let batch = FlowBatch::new(transformer, &sample, &video)?;
        let attend = video.attention();
        let loss = loss_and_gradients(transformer, &weights, &batch, recompute, attend, &mut |_, gradients| {
            all.extend(gradients);
            Ok(())
        })?;
        Ok((loss, all))
    })?;
    let (mut loss, mut sums) = (0.0, Weights::new());
    for (of_rank, gradients) in parts {
        loss += of_rank;
        for (name, gradient) in gradients {
            let sum = match sums.get(&name) {
                Some(sum) => (sum + gradient)?,
                None => gradient,
            };
            sums.insert(name, sum);
        }
    }
    Ok((loss, sums))
}

#[test]
fn loss_and_gradients_of_all_adapters_are_those_of_pytorch() -> Result<()> {
    let reference = load("reference.safetensors");
    let losses = reference["losses"].to_vec1::<f32>()?;
    for of in [WeightType::F32, WeightType::AsStored] {
        for recompute in [Recompute::Full, Recompute::KeepAttention, Recompute::Nothing] {
            let (loss, gradients) = first_step((1, 1), of, recompute)?;
            assert!((loss / f64::from(losses[0]) - 1.0).abs() < 1e-5, "loss {loss}, not {}", losses[0]);
            let wanted = reference.keys().filter(|name| name.starts_with("gradient.")).count();
            assert_eq!(gradients.len(), wanted);
            for (name, gradient) in &gradients {
                // B has the factor here, and A does not: what A's product goes through is the same.
                let factor = if name.ends_with("lora_B.weight") { FACTOR } else { 1.0 };
                let far = distance(&(gradient * factor)?, &reference[&format!("gradient.{name}")]);
                assert!(far < 1e-4, "{name}, {recompute}, weights {of}: {far:e}");
            }
        }
    }
    Ok(())
}

#[test]
fn every_mesh_has_the_gradients_of_one_rank() -> Result<()> {
    let (loss, one) = first_step((1, 1), WeightType::F32, Recompute::KeepAttention)?;
    // The two videos have 12 tokens each.
    for mesh in [(2, 1), (1, 2), (3, 1), (2, 2), (4, 2), (5, 1), (25, 1)] {
        let (of_mesh, gradients) = first_step(mesh, WeightType::F32, Recompute::KeepAttention)?;
        assert!((of_mesh / loss - 1.0).abs() < 1e-5, "{mesh:?}: loss {of_mesh}, not {loss}");
        for (name, gradient) in &gradients {
            let far = distance(gradient, &one[name]);
            assert!(far < 1e-5, "{name} on {mesh:?}: {far:e}");
        }
    }
    Ok(())
}

#[test]
fn samples_that_do_not_fit_are_refused_with_the_numbers() -> Result<()> {
    let data = load("data.safetensors");
    let refused = |name: &str, tensor: Tensor| -> Result<String> {
        let mut data = data.clone();
        data.insert(name.into(), tensor);
        Ok(message(sample(&data)))
    };
    assert!(refused("noise", data["noise"].narrow(4, 0, 2)?)?.contains("`noise` is [2, 4, 2, 6, 2]"));
    assert!(refused("latents", data["latents"].get(0)?)?.contains("[B, C, F, H, W]"));
    assert!(refused("timesteps", data["timesteps"].narrow(0, 0, 1)?)?.contains("1 `timesteps`"));
    assert!(refused("timesteps", Tensor::new(&[1f32, 1001.0], &Device::Cpu)?)?.contains("1001"));
    let i2v = WanFolder::open(&fixture("i2v"))?;
    let found = message(i2v.transformer().check_sample(&sample(&data)?));
    assert!(found.contains("image_embeds"), "{found}");
    let mut narrow = data.clone();
    narrow.insert("prompt_embeds".into(), data["prompt_embeds"].narrow(2, 0, 15)?);
    let found = message(WanFolder::open(&fixture("t2v"))?.transformer().check_sample(&sample(&narrow)?));
    assert!(found.contains("prompt_embeds") && found.contains("16]"), "{found}");
    Ok(())
}

/// The layers that have adapters in the fixture: all that can have one.
const LAYERS: [&str; 10] = [
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "ffn.net.0.proj",
    "ffn.net.2",
    "time_proj",
    "linear_1",
    "linear_2",
    "proj_out",
];

#[test]
fn steps_of_adamw_are_those_of_pytorch_on_every_mesh() -> Result<()> {
    let reference = load("reference.safetensors");
    let losses = reference["losses"].to_vec1::<f32>()?;
    let lora = Lora::new(3, 6.0, LAYERS.map(str::to_owned).to_vec())?;
    let folder = WanFolder::open(&fixture("t2v"))?.with_new_adapters(&lora)?;
    let (frozen, sample) = (folder.load(WeightType::F32)?, sample(&load("data.safetensors"))?);
    let mut initial = BTreeMap::new();
    for (name, tensor) in load("initial/pytorch_lora_weights.safetensors") {
        initial.insert(name.replace("transformer.", ""), tensor.flatten_all()?.to_vec1::<f32>()?);
    }
    // All weights on each rank, or a share.
    for ((ring, ulysses), shards) in [((1, 1), false), ((2, 2), false), ((5, 1), false), ((2, 1), true), ((1, 2), true)]
    {
        let mesh = VideoMesh { ring, ulysses, ..VideoMesh::single() };
        let ends = VideoRanks::start(&mesh)?.run(|groups| {
            let share = folder.load_share(WeightType::F32, groups.video().cp().split(0, groups.rank())?)?;
            let frozen: &dyn UnitWeights = if shards { &share } else { &frozen };
            let method = OptimizerConfig::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
            let optimizer = Optimizer::new(method);
            let policy = Recompute::KeepAttention;
            let mut trainer =
                AdapterTrainer::new(folder.transformer(), frozen, groups, policy, initial.clone(), optimizer)?;
            let mut found = Vec::new();
            for step in 0..losses.len() as u64 {
                let settings = StepSettings { step, lr: 1e-2, grad_clip: None };
                found.push(trainer.step(std::slice::from_ref(&sample), settings)?.0);
            }
            Ok((found, trainer.matrices()?))
        })?;
        for (found, matrices) in &ends {
            for (found, wanted) in found.iter().zip(&losses) {
                assert!((found / f64::from(*wanted) - 1.0).abs() < 1e-4, "{mesh}: loss {found}, not {wanted}");
            }
            for (name, matrix) in matrices {
                let far = distance(matrix, &reference[&format!("after.{name}")]);
                assert!(far < 1e-4, "{name} on {mesh}: {far:e}");
            }
        }
    }
    Ok(())
}

/// A file of samples without noise and time steps, which are drawn.
fn data_file(folder: &Path) -> Result<PathBuf> {
    let data = load("data.safetensors");
    let kept = ["latents", "prompt_embeds"].map(|name| (name.to_owned(), data[name].clone()));
    let path = folder.join("data.safetensors");
    candle_core::safetensors::save(&HashMap::from(kept), &path)?;
    Ok(path)
}

fn settings(folder: &Path) -> Result<Settings> {
    Ok(Settings {
        model: Some(fixture("t2v")),
        data: Some(vec![data_file(folder)?]),
        out: Some(folder.join("out")),
        lora_rank: Some(2),
        ring: Some(1),
        threads: Some(1),
        steps: Some(6),
        lr: Some(2e-2),
        warmup: Some(0),
        schedule: Some("constant".into()),
        seed: Some(3),
        ..Settings::default()
    })
}

/// Trains as the settings say, and stops after this step; returns the losses.
fn train(settings: Settings, last: u64) -> Result<Vec<f64>> {
    let config = TrainConfig::from_args(&TrainArgs { settings, ..TrainArgs::default() })?;
    let training = VideoTraining::open(&config, &ProcessGroup::single())?;
    let (stop, losses) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let outcome = training.run(&stop, &|metrics| {
        losses.lock().expect("no panic").push(metrics.loss);
        stop.store(metrics.step == last, Ordering::SeqCst);
    })?;
    assert_eq!((outcome.step, outcome.interrupted), (last, last < training.steps()));
    Ok(losses.into_inner().expect("no panic"))
}

fn adapter(folder: &Path) -> Result<HashMap<String, Tensor>> {
    Ok(candle_core::safetensors::load(folder.join("out/pytorch_lora_weights.safetensors"), &Device::Cpu)?)
}

#[test]
fn a_training_lowers_the_loss_and_goes_on_after_a_stop_on_another_mesh() -> Result<()> {
    let [whole, stopped] = [0, 1].map(|_| tempfile::tempdir().expect("a folder"));
    let losses = train(settings(whole.path())?, 6)?;
    let mut of_parts = train(Settings { save_every: Some(0), ..settings(stopped.path())? }, 4)?;
    assert!(!stopped.path().join("out/pytorch_lora_weights.safetensors").exists(), "an adapter of an unfinished run");
    let resumed = Settings { resume: Some(stopped.path().join("out")), ring: Some(3), ..Settings::default() };
    of_parts.extend(train(resumed, 6)?);
    for (one, other) in losses.iter().zip(&of_parts) {
        assert!((one / other - 1.0).abs() < 1e-4, "{losses:?}, {of_parts:?}");
    }
    assert_eq!((losses.len(), of_parts.len()), (6, 6));
    let metrics = std::fs::read_to_string(stopped.path().join("out/metrics.jsonl")).expect("a file");
    assert_eq!(metrics.lines().count(), 6);
    let (one, other) = (adapter(whole.path())?, adapter(stopped.path())?);
    for (name, matrix) in &one {
        let far = distance(&other[name], matrix);
        assert!(far < 1e-3, "{name}: {far:e}");
    }

    // The loss of the first sample, with the adapter and without it.
    let data = ringspan_video::training::FlowData::open(&data_file(whole.path())?)?;
    let loss = |sources: &[LoraSource]| -> Result<f64> {
        let folder = WanFolder::open(&fixture("t2v"))?.with_loras(sources)?;
        let (transformer, weights, sample) = (folder.transformer(), folder.load(WeightType::F32)?, data.sample(3, 0)?);
        let parts = on_ranks((1, 1), |group, alone| {
            let grid = transformer.grid_of(sample.shape())?;
            let video = VideoContext::new(transformer.config(), group, alone, 2, grid)?;
            let batch = FlowBatch::new(transformer, &sample, &video)?;
            let attend = video.attention();
            Ok(loss_and_gradients(transformer, &weights, &batch, Recompute::Full, attend, &mut |_, _| Ok(()))?)
        })?;
        Ok(parts[0])
    };
    let (before, after) = (loss(&[])?, loss(&[LoraSource { path: whole.path().join("out"), scale: 1.0 }])?);
    assert!((before / losses[0] - 1.0).abs() < 1e-5, "new adapters change nothing: {before}, {}", losses[0]);
    assert!(after < 0.8 * before, "{before} before, {after} after");
    Ok(())
}

#[test]
fn settings_and_data_without_effect_are_refused_by_name() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let good = settings(folder.path())?;
    let refused = |settings: Settings, words: &[&str]| {
        let config = TrainConfig::from_args(&TrainArgs { settings, ..TrainArgs::default() });
        let opened = config
            .map_err(ringspan_video::Error::from)
            .and_then(|config| VideoTraining::open(&config, &ProcessGroup::single()).map(drop));
        let found = message(opened);
        for word in words {
            assert!(found.contains(word), "'{word}' is not in: {found}");
        }
    };
    refused(Settings { dtype: Some("bf16".into()), ..good.clone() }, &["--dtype has no effect", "lora-rank"]);
    refused(Settings { dp_replicate: Some(2), ..good.clone() }, &["--dp-replicate has no effect"]);
    refused(Settings { lora_dropout: Some(0.1), ..good.clone() }, &["--lora-dropout has no effect"]);
    refused(Settings { recompute: Some("auto".into()), ..good.clone() }, &["--recompute auto", "keep-attention"]);
    refused(Settings { lora_rank: None, ..good.clone() }, &["--lora-rank is missing"]);
    refused(Settings { data: None, ..good.clone() }, &["--data is missing"]);
    refused(Settings { lora_targets: Some("q_proj".into()), ..good.clone() }, &["'q_proj'", "attn1.to_q"]);
    refused(Settings { model: Some(fixture("i2v")), ..good.clone() }, &["image_embeds"]);
    refused(
        Settings { data: Some(vec![fixture("t2v/reference.safetensors")]), ..good.clone() },
        &["`latents` is missing"],
    );
    refused(Settings { data: Some(vec![fixture("loops/reference.safetensors")]), ..good.clone() }, &["no effect"]);
    let mut odd = load("data.safetensors");
    odd.insert("latents".into(), odd["latents"].narrow(3, 0, 5)?);
    let path = folder.path().join("odd.safetensors");
    candle_core::safetensors::save(&odd, &path)?;
    refused(Settings { data: Some(vec![path]), ..good.clone() }, &["odd.safetensors", "`noise` is"]);
    Ok(())
}
