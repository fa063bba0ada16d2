//! The files of a transformer's weights: safetensors as diffusers saves them, or one GGUF file.

use super::config::WanConfig;
use super::gguf_weights::GgufWeights;
use crate::error::{Error, Result};
use crate::gguf_folder::{gguf_of, is_gguf};
use crate::tensor_folder::TensorFolder;
use candle_core::Tensor;
use ringspan_candle::Weight;
use std::collections::BTreeMap;
use std::path::Path;

/// A transformer's weights on disk.
#[derive(Debug)]
pub(super) enum WeightFiles {
    Safetensors(TensorFolder),
    Gguf(GgufWeights),
}

/// The stem of the names of diffusers' weight files.
pub(super) const WEIGHTS: &str = "diffusion_pytorch_model";

impl WeightFiles {
    /// Opens a transformer's folder, or a GGUF file; returns the configuration of `config.json` in the folder or beside the file, or
    /// else the one that the shapes of a GGUF file amount to.
    pub(super) fn open(path: &Path) -> Result<(WanConfig, Self)> {
        let is_file = path.is_file();
        let (folder, gguf) = match is_file {
            true => (path.parent().unwrap_or(Path::new("")), Some(path.to_owned())),
            false => (path, gguf_of(path, WEIGHTS)?),
        };
        let Some(gguf) = gguf else {
            return Ok((WanConfig::read(path)?, Self::Safetensors(TensorFolder::open(path, WEIGHTS)?)));
        };
        if !is_gguf(&gguf) {
            let problem = "neither a folder nor a .gguf file; a safetensors file is read with its folder".into();
            return Err(Error::Format { path: gguf, problem });
        }
        let weights = GgufWeights::open(&gguf)?;
        let config = match folder.join("config.json").is_file() {
            true => WanConfig::read(folder)?,
            false => weights.config()?,
        };
        Ok((config, Self::Gguf(weights)))
    }

    /// Checks that there are the tensors of these names and shapes, and no others except those that `ignored` names.
    pub(super) fn check(&self, wanted: &BTreeMap<String, Vec<usize>>, ignored: impl Fn(&str) -> bool) -> Result<()> {
        match self {
            Self::Safetensors(tensors) => tensors.check(wanted, ignored),
            Self::Gguf(weights) => weights.check(wanted, ignored),
        }
    }

    /// Bytes that a tensor takes in memory as [`read_stored`](Self::read_stored) returns it.
    pub(super) fn stored_bytes(&self, name: &str) -> Result<u64> {
        match self {
            Self::Safetensors(tensors) => tensors.stored_bytes(name),
            Self::Gguf(weights) => weights.stored_bytes(name),
        }
    }

    /// Reads a tensor as f32.
    pub(super) fn read(&self, name: &str) -> Result<Tensor> {
        match self {
            Self::Safetensors(tensors) => tensors.read(name),
            Self::Gguf(weights) => weights.read(name),
        }
    }

    /// Reads a tensor as layers compute with it: matrices as they are stored, everything else in f32.
    pub(super) fn read_stored(&self, name: &str) -> Result<Weight> {
        match self {
            Self::Safetensors(tensors) => tensors.read_stored(name),
            Self::Gguf(weights) => weights.read_stored(name),
        }
    }
}
