//! Opens a model from any of its formats: a Hugging Face folder, an adapter with its base model, a GGUF file.

use crate::adapter::{self, Description};
use crate::base::{Base, download_hint};
use crate::config::Config;
use crate::decoder::Decoder;
use crate::error::{Error, Result};
use crate::lora::Lora;
use crate::{gguf, special_tokens};
use ringspan_candle::model::stored;
use ringspan_candle::{StoredWeights, Weights};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

const TOKENIZER: &str = "tokenizer.json";

/// A model on disk, with or without an adapter.
#[derive(Debug)]
pub enum ModelSource {
    /// A model without an adapter.
    Model(Base),
    /// The folder of an adapter, and its description, which names the base model.
    Adapter(PathBuf, Box<Description>),
}

impl ModelSource {
    /// Finds out what is at `path`. A folder that holds a model and an adapter counts as a model: its adapter was merged.
    ///
    /// # Errors
    /// A path that does not exist, and an adapter that cannot be read.
    pub fn at(path: &Path) -> Result<Self> {
        let path = path.to_owned();
        if !path.is_file() && !path.is_dir() {
            let problem = format!("there is no such folder or file{}", download_hint(&path));
            return Err(Error::Format { path, problem });
        }
        match adapter::is_adapter_folder(&path) {
            true => adapter::describe(&path).map(|adapter| Self::Adapter(path, Box::new(adapter))),
            false => Ok(Self::Model(Base::at(path))),
        }
    }

    /// The model itself, or the base model of an adapter.
    pub fn base(&self) -> &Base {
        match self {
            Self::Model(base) => base,
            Self::Adapter(_, adapter) => &adapter.base,
        }
    }

    /// `config.json` of the model.
    ///
    /// # Errors
    /// A file that is missing or corrupt.
    pub fn config_json(&self) -> Result<Value> {
        self.base().config_json()
    }

    /// The configuration, and the weights as f32 with an adapter merged in.
    ///
    /// # Errors
    /// Files that are missing or corrupt, and tensors that do not fit the model.
    pub fn load(self) -> Result<(Config, Weights)> {
        let (config, mut weights) = self.base().load()?;
        let Self::Adapter(_, adapter) = &self else { return Ok((config, weights)) };
        let decoder = Decoder::new(config.clone())?.with_lora(adapter.lora.clone())?;
        weights.extend(self.adapter(&decoder)?);
        Ok((config, adapter.lora.merge(weights)?))
    }

    /// The configuration, and the weights, with matrices as the files store them. An adapter is merged if all matrices are
    /// dense; else it stays apart: its settings are returned, and its matrices are among the weights.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn load_stored(self) -> Result<(Config, Option<Lora>, StoredWeights)> {
        let (config, mut weights) = self.base().load_stored()?;
        let Self::Adapter(_, adapter) = &self else { return Ok((config, None, weights)) };
        let decoder = Decoder::new(config.clone())?.with_lora(adapter.lora.clone())?;
        let matrices = self.adapter(&decoder)?;
        if weights.values().any(|weight| weight.dense().is_none()) {
            weights.extend(stored(matrices));
            return Ok((config, Some(adapter.lora.clone()), weights));
        }
        let dense = weights.into_iter().map(|(name, weight)| Ok((name, weight.to_tensor()?)));
        let mut dense: Weights = dense.collect::<Result<_>>()?;
        dense.extend(matrices);
        Ok((config, None, stored(adapter.lora.merge(dense)?)))
    }

    /// The matrices of the adapter, which `decoder` has attached; empty if there is no adapter.
    ///
    /// # Errors
    /// Files that are missing or corrupt; a matrix that is missing, unknown or of another shape.
    pub fn adapter(&self, decoder: &Decoder) -> Result<Weights> {
        match self {
            Self::Model(_) => Ok(Weights::new()),
            Self::Adapter(path, _) => adapter::load_matrices(path, decoder),
        }
    }

    /// The folders that may hold further files of the model, such as its tokenizer: the adapter's before the base model's.
    pub fn folders(&self) -> Vec<&Path> {
        let own = match self {
            Self::Adapter(path, _) => Some(path.as_path()),
            Self::Model(_) => None,
        };
        let of_base = match self.base() {
            Base::Folder(path) => Some(path.as_path()),
            Base::Gguf(_) => None,
        };
        own.into_iter().chain(of_base).collect()
    }

    /// The path of `tokenizer.json`, if a folder has one: the adapter's before the base model's.
    pub fn tokenizer_file(&self) -> Option<PathBuf> {
        self.folders().into_iter().map(|folder| folder.join(TOKENIZER)).find(|path| path.exists())
    }

    /// Tokens that end a text: `eos_token_id` of the first `generation_config.json` that has one, else of `config.json`.
    ///
    /// # Errors
    /// A file that is missing or corrupt, and an `eos_token_id` that is not a token.
    pub fn end_tokens(&self) -> Result<Vec<u32>> {
        special_tokens::end_tokens(&self.folders(), &self.config_json()?)
    }

    /// The chat template in a GGUF file, if it has one. Folders keep theirs in files, which are not read here.
    ///
    /// # Errors
    /// A file that is missing or corrupt.
    pub fn chat_template(&self) -> Result<Option<gguf::ChatTemplate>> {
        match self.base() {
            Base::Gguf(path) => gguf::chat_template(path),
            Base::Folder(_) => Ok(None),
        }
    }

    /// The tokenizer, if there is one, from `tokenizer.json` or the GGUF file, without the truncation and padding that the file
    /// may ask for.
    ///
    /// # Errors
    /// A file that is corrupt, or a kind of tokenizer that is unknown.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        let Some(path) = self.tokenizer_file() else {
            return match self.base() {
                Base::Gguf(path) if gguf::has_tokenizer(path)? => gguf::tokenizer(path).map(Some),
                Base::Gguf(_) => Ok(None),
                Base::Folder(_) => Ok(None),
            };
        };
        let bytes = std::fs::read(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
        let broken = |error| Error::Format { path, problem: format!("not a tokenizer: {error}") };
        Tokenizer::from_bytes(&bytes).and_then(special_tokens::without_truncation).map(Some).map_err(broken)
    }
}
