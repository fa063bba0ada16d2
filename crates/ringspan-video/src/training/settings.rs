//! Which settings of `ringspan train` have an effect on a video transformer.

use crate::error::{Error, Result};
use ringspan_models::Lora;
use ringspan_train::{DataSource, TrainConfig, TrainingLength};
use std::path::{Path, PathBuf};

const KNOWN: [&str; 27] = [
    "model",
    "data",
    "out",
    "lora-rank",
    "lora-alpha",
    "lora-targets",
    "ring",
    "ulysses",
    "threads",
    "recompute",
    "activations",
    "deadline",
    "steps",
    "optimizer",
    "lr",
    "weight-decay",
    "beta1",
    "beta2",
    "eps",
    "momentum",
    "warmup",
    "schedule",
    "grad-clip",
    "grad-accumulation",
    "seed",
    "save-every",
    "keep",
];

/// The layers that have adapters where the settings do not name any: those of attention and of the feed-forward part.
const LAYERS: [&str; 6] = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"];

/// Refuses settings without effect; returns the adapters to train.
pub(super) fn checked(config: &TrainConfig) -> Result<Lora> {
    let refuse = |problem: String| Err(Error::Input(problem));
    // The file of a run that is resumed has the batch size of text, whatever the run is.
    let is_known = |key: &&String| KNOWN.contains(&key.as_str()) || (config.resume && *key == "batch-size");
    if let Some(key) = config.settings.keys()?.iter().find(|key| !is_known(key)) {
        return refuse(format!(
            "--{key} has no effect in the training of a video transformer; what has: {}",
            KNOWN.join(", ")
        ));
    }
    if config.settings.recompute.as_deref() == Some("auto") {
        return refuse(
            "--recompute auto: possible in the training of a video transformer are full, keep-attention, nothing"
                .into(),
        );
    }
    let Some(lora) = &config.lora else {
        return refuse("--lora-rank is missing: of a video transformer, adapters are trained".into());
    };
    match config.settings.lora_targets {
        Some(_) => Ok(lora.clone()),
        None => Ok(Lora::new(lora.rank, lora.alpha, LAYERS.map(str::to_owned).to_vec())?),
    }
}

/// The file or folder of `--data`.
pub(super) fn data(config: &TrainConfig) -> Result<&Path> {
    match &config.source {
        DataSource::Text(sources) if config.settings.data.is_some() => match &sources[..] {
            [source] if source.weight.is_none() => Ok(&source.path),
            sources => Err(Error::Input(format!(
                "--data is given {} times; the samples of a video transformer are in one file or folder",
                sources.len()
            ))),
        },
        _ => Err(Error::Input(
            "--data is missing: a safetensors file, or a folder of such, with latents and prompt_embeds".into(),
        )),
    }
}

/// Number of steps.
pub(super) fn steps(config: &TrainConfig) -> Result<u64> {
    match config.length {
        TrainingLength::Steps(steps) => Ok(steps),
        TrainingLength::Epochs(_) => Err(Error::Input("--epochs has no effect here: give --steps".into())),
    }
}

/// The safetensors files of a path, in the order of their names.
pub(super) fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let io = |source| Error::Io { path: path.to_owned(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(io)? {
        let file = entry.map_err(io)?.path();
        if file.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(file);
        }
    }
    files.sort();
    match files.is_empty() {
        true => Err(Error::Format { path: path.to_owned(), problem: "there is no .safetensors file".into() }),
        false => Ok(files),
    }
}
