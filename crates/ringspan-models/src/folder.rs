//! Model folders as Hugging Face lays them out: `config.json`, and safetensors in one file or in shards with an index.

mod mxfp4;
mod names;
mod read;
mod stored_parameter;
mod write;

pub use read::{Folder, open};
pub(crate) use write::replace;
pub use write::{SavedType, Writer, save};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::registry::with_family_defaults;
use ringspan_candle::{StoredWeights, Weights};
use std::path::Path;

pub(crate) const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Reads a model: its configuration, and its weights as f32.
///
/// # Errors
/// Files that are missing or corrupt, and tensors that are missing, unknown or of another shape or type.
pub fn load(folder: &Path) -> Result<(Config, Weights)> {
    let folder = open(folder)?;
    let read = |(name, shape): (&String, &Vec<usize>)| {
        Ok((name.clone(), folder.read(name, 0..shape.first().copied().unwrap_or(0))?))
    };
    let weights = folder.shapes().iter().map(read).collect::<Result<_>>()?;
    Ok((folder.config().clone(), weights))
}

/// Like [`load`], but matrices in bf16, f16 and MXFP4 stay as they are stored; everything else becomes f32.
///
/// # Errors
/// As for [`load`].
pub fn load_stored(folder: &Path) -> Result<(Config, StoredWeights)> {
    let folder = open(folder)?;
    let read = |name: &String| Ok((name.clone(), folder.read_stored(name)?));
    let weights = folder.shapes().keys().map(read).collect::<Result<_>>()?;
    Ok((folder.config().clone(), weights))
}

/// Reads `config.json` of a folder, or the JSON file itself if `path` is a file, to be saved with the model again. Of a model that
/// also sees images, it is the part that describes the language model.
///
/// # Errors
/// A file that is missing or not JSON.
pub fn config_json(path: &Path) -> Result<serde_json::Value> {
    parse(&if path.is_file() { path.to_owned() } else { path.join(CONFIG) }).map(with_family_defaults)
}

fn parse<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = std::fs::read(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
    serde_json::from_slice(&bytes).map_err(|error| Error::Format { path: path.to_owned(), problem: error.to_string() })
}
