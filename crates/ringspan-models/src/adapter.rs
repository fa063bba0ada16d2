//! Adapter folders as PEFT lays them out: `adapter_config.json` and `adapter_model.safetensors`.

mod config;

use crate::base::{Base, download_hint};
use crate::decoder::Decoder;
use crate::error::{Error, Result};
use crate::folder;
use crate::lora::{Lora, is_adapter};
use candle_core::{DType, Device, Tensor};
use ringspan_candle::Weights;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The file whose presence marks a folder as an adapter's.
pub const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
/// Prefix that PEFT puts before the model's parameter names.
const PREFIX: &str = "base_model.model.";

/// An adapter as its configuration describes it, without its matrices.
#[derive(Debug)]
pub struct Description {
    /// The base model that the adapter was trained for.
    pub base: Base,
    /// Rank, alpha, dropout and target layers.
    pub lora: Lora,
    /// The reason why training of the adapter cannot be continued, if it cannot.
    pub frozen: Option<&'static str>,
}

/// An adapter with its matrices.
#[derive(Debug)]
pub struct Adapter {
    /// The base model that the adapter was trained for.
    pub base: Base,
    /// Rank, alpha, dropout and target layers.
    pub lora: Lora,
    /// The matrices A and B, by their names in a [`Decoder`] with this `lora`.
    pub weights: Weights,
}

/// Whether `folder` holds an adapter. A folder that holds a model, too, counts as a model: its adapter was merged.
pub fn is_adapter_folder(folder: &Path) -> bool {
    !folder.join(folder::CONFIG).exists() && folder.join(CONFIG).exists()
}

/// Writes the adapters among `weights`, and names `base` as their model. The configuration is written last, so that a folder
/// without it, left by a failure, is not taken for an adapter.
///
/// # Errors
/// Failures of the file system, with the file.
pub fn save(folder: &Path, base: &Path, lora: &Lora, weights: &Weights) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.to_owned(), source })?;
    let path = folder.join(TENSORS);
    let format = |problem: String| Error::Format { path: path.clone(), problem };
    let adapters = weights.iter().filter(|(name, _)| is_adapter(name));
    let named: Vec<(String, Tensor)> =
        adapters.map(|(name, tensor)| Ok((format!("{PREFIX}{name}"), tensor.contiguous()?))).collect::<Result<_>>()?;
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let bytes = safetensors::serialize(named, Some(metadata)).map_err(|error| format(error.to_string()))?;
    folder::replace(&path, &bytes)?;
    folder::replace(&folder.join(CONFIG), format!("{:#}\n", config::written(lora, base)).as_bytes())
}

/// Reads the configuration of an adapter, without its matrices.
///
/// # Errors
/// A file that is missing or corrupt, a kind of adapter that this crate cannot compute, and a base model that is not on disk.
pub fn describe(folder: &Path) -> Result<Description> {
    let path = folder.join(CONFIG);
    let bytes = std::fs::read(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
    let config::Config { base, lora, frozen } = config::Config::parse(&bytes, &path)?;
    let refuse = |problem: String| Error::Format { path: path.clone(), problem };
    let base = base.ok_or_else(|| refuse("it does not name its model".into()))?;
    // The path may be relative to the working folder or to the adapter's folder.
    let found = [PathBuf::from(&base), folder.join(&base)].into_iter().find(|base| base.exists());
    let found = found.ok_or_else(|| {
        refuse(format!(
            "its model '{base}' is no folder or file here; set base_model_name_or_path to where it is{}",
            download_hint(Path::new(&base))
        ))
    })?;
    Ok(Description { base: Base::at(found), lora, frozen })
}

/// Parses an adapter's configuration; `path` is the file's name for messages.
///
/// # Errors
/// A text that is corrupt, and a kind of adapter that this crate cannot compute.
pub fn parse_config(text: &[u8], path: &Path) -> Result<Lora> {
    Ok(config::Config::parse(text, path)?.lora)
}

/// Reads an adapter with its matrices.
///
/// # Errors
/// As for [`describe`]; tensors that belong to no adapter.
pub fn load(folder: &Path) -> Result<Adapter> {
    let Description { base, lora, .. } = describe(folder)?;
    Ok(Adapter { base, lora, weights: matrices(folder)? })
}

/// Reads an adapter for a model that is in memory, and attaches it to `decoder`; which base model its configuration names does not
/// matter, as long as its matrices fit. Returns the decoder and the matrices.
///
/// # Errors
/// A decoder that has adapters already; files that are missing or corrupt; a kind of adapter that this crate cannot compute;
/// matrices that do not fit the model.
pub fn attach(folder: &Path, decoder: Decoder) -> Result<(Decoder, Weights)> {
    if decoder.lora().is_some() {
        return Err(Error::Lora("the model has an adapter of its own; merge that one into the model first".into()));
    }
    let path = folder.join(CONFIG);
    let bytes = std::fs::read(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
    let config::Config { lora, .. } = config::Config::parse(&bytes, &path)?;
    let decoder = decoder.with_lora(lora)?;
    let weights = load_matrices(folder, &decoder)?;
    Ok((decoder, weights))
}

/// Reads the matrices of an adapter, and checks that they are exactly those of `decoder`, which has its adapters attached.
///
/// # Errors
/// Files that are missing or corrupt; a matrix that is missing, unknown or of another shape.
pub(crate) fn load_matrices(folder: &Path, decoder: &Decoder) -> Result<Weights> {
    let weights = matrices(folder)?;
    let mut expected = decoder.shapes();
    expected.retain(|name, _| is_adapter(name));
    for (name, tensor) in &weights {
        let actual = tensor.dims().to_vec();
        match expected.remove(name) {
            None => return Err(Error::Unknown { name: name.clone(), shape: actual }),
            Some(expected) if expected != actual => return Err(Error::Shape { name: name.clone(), expected, actual }),
            Some(_) => {}
        }
    }
    match expected.pop_first() {
        Some((name, shape)) => Err(Error::Missing { name, shape }),
        None => Ok(weights),
    }
}

fn matrices(folder: &Path) -> Result<Weights> {
    let path = folder.join(TENSORS);
    let damaged = |problem: String| Error::Format { path: path.clone(), problem };
    let bytes = std::fs::read(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
    let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).map_err(|e| damaged(e.to_string()))?;
    let mut weights = Weights::new();
    for (name, tensor) in tensors {
        let known = name.strip_prefix(PREFIX).filter(|name| is_adapter(name));
        let known =
            known.ok_or_else(|| damaged(format!("tensor {name} belongs to no LoRA adapter of a linear layer")))?;
        weights.insert(known.to_owned(), tensor.to_dtype(DType::F32)?);
    }
    Ok(weights)
}
