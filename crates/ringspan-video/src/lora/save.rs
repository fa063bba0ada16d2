//! Writes adapters as diffusers' `save_lora_weights` does, so that its `load_lora_weights` reads them.

use super::file::{DIFFUSERS, METADATA};
use crate::error::{Error, Result};
use candle_core::Tensor;
use ringspan_candle::lora::layer_of;
use ringspan_models::Lora;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// Writes the matrices of a transformer's adapters, by their names `LAYER.lora_A.weight` and `LAYER.lora_B.weight`, into a folder;
/// returns the file.
///
/// # Errors
/// Failures of the file system.
pub fn save(folder: &Path, lora: &Lora, matrices: &BTreeMap<String, Tensor>) -> Result<PathBuf> {
    let path = folder.join(DIFFUSERS);
    let layers: BTreeSet<&str> = matrices.keys().filter_map(|name| layer_of(name)).collect();
    let config = json!({
        "transformer.peft_type": "LORA",
        "transformer.r": lora.rank,
        "transformer.lora_alpha": lora.alpha,
        "transformer.target_modules": layers,
    });
    // With one entry, the same matrices are the same bytes: a map has no order. Diffusers does not read `format`.
    let metadata = HashMap::from([(METADATA.to_owned(), format!("{config:#}"))]);
    let named = matrices.iter().map(|(name, matrix)| (format!("transformer.{name}"), matrix));
    let bytes = safetensors::serialize(named, Some(metadata))
        .map_err(|error| Error::Format { path: path.clone(), problem: error.to_string() })?;
    std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.to_owned(), source })?;
    ringspan_train::checkpoint::write_file(&path, &bytes)?;
    Ok(path)
}
