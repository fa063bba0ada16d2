//! A model wherever it is: a Hugging Face folder, an adapter beside one, a GGUF file.

use crate::adapter::{self, Adapter};
use crate::config::Config;
use crate::decoder::{Decoder, Weights};
use crate::error::{Error, Result};
use crate::{folder, gguf};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

const TOKENIZER: &str = "tokenizer.json";

/// Where a model comes from.
#[derive(Debug)]
pub enum Origin {
    /// A folder as Hugging Face's.
    Folder(PathBuf),
    /// A folder with an adapter, which is merged into its model: a folder, or a GGUF file.
    Adapter(PathBuf, Box<Adapter>),
    /// A GGUF file.
    Gguf(PathBuf),
}

impl Origin {
    /// What is at `path`. A folder that holds a model and an adapter is a model: it was merged.
    ///
    /// # Errors
    /// Nothing there, and an adapter that cannot be read.
    pub fn at(path: &Path) -> Result<Self> {
        let path = path.to_owned();
        if path.is_file() {
            return Ok(Self::Gguf(path));
        }
        if !path.is_dir() {
            return Err(Error::Format { path, problem: "there is no such folder or file".into() });
        }
        match !path.join(folder::CONFIG).exists() && path.join(adapter::CONFIG).exists() {
            true => adapter::load(&path).map(|adapter| Self::Adapter(path, Box::new(adapter))),
            false => Ok(Self::Folder(path)),
        }
    }

    /// `config.json` of the model.
    ///
    /// # Errors
    /// A file that is missing or corrupt.
    pub fn config_json(&self) -> Result<Value> {
        match self {
            Self::Folder(path) => folder::config_json(path),
            Self::Adapter(_, adapter) if adapter.base.is_file() => gguf::config_json(&adapter.base),
            Self::Adapter(_, adapter) => folder::config_json(&adapter.base),
            Self::Gguf(path) => gguf::config_json(path),
        }
    }

    /// The configuration, and the weights as f32 with an adapter merged in.
    ///
    /// # Errors
    /// Files that are missing or corrupt, and tensors that do not fit the model.
    pub fn load(self) -> Result<(Config, Weights)> {
        let adapter = match self {
            Self::Folder(path) => return folder::load(&path),
            Self::Gguf(path) => return gguf::load(&path),
            Self::Adapter(_, adapter) => adapter,
        };
        let (config, mut weights) = match adapter.base.is_file() {
            true => gguf::load(&adapter.base)?,
            false => folder::load(&adapter.base)?,
        };
        let expected = Decoder::new(config.clone())?.with_lora(adapter.lora.clone())?.shapes();
        for (name, tensor) in adapter.weights {
            match expected.get(&name) {
                None => return Err(Error::Unknown { name, shape: tensor.dims().to_vec() }),
                Some(shape) if shape != tensor.dims() => {
                    return Err(Error::Shape { name, expected: shape.clone(), actual: tensor.dims().to_vec() });
                }
                Some(_) => drop(weights.insert(name, tensor)),
            }
        }
        if let Some((name, shape)) = expected.into_iter().find(|(name, _)| !weights.contains_key(name)) {
            return Err(Error::Missing { name, shape });
        }
        Ok((config, adapter.lora.merge(weights)?))
    }

    /// The folders that may hold files beside the weights, the nearest first.
    pub fn folders(&self) -> Vec<&Path> {
        match self {
            Self::Folder(path) => vec![path],
            Self::Adapter(path, adapter) if adapter.base.is_file() => vec![path],
            Self::Adapter(path, adapter) => vec![path, &adapter.base],
            Self::Gguf(_) => Vec::new(),
        }
    }

    /// The tokenizer's own file, the nearest, if it has one.
    pub fn tokenizer_file(&self) -> Option<PathBuf> {
        self.folders().into_iter().map(|folder| folder.join(TOKENIZER)).find(|path| path.exists())
    }

    /// The tokenizer, if there is one: `tokenizer.json`, or what a GGUF file holds.
    ///
    /// # Errors
    /// A file that is corrupt, or a kind that is unknown.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        let Some(path) = self.tokenizer_file() else {
            return match self {
                Self::Gguf(path) => gguf::tokenizer(path).map(Some),
                Self::Adapter(_, adapter) if adapter.base.is_file() => gguf::tokenizer(&adapter.base).map(Some),
                _ => Ok(None),
            };
        };
        let bytes = std::fs::read(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
        let broken = |error| Error::Format { path, problem: format!("not a tokenizer: {error}") };
        Tokenizer::from_bytes(&bytes).map(Some).map_err(broken)
    }
}
