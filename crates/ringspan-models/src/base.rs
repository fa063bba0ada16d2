//! A model with its own weights on disk, as opposed to an adapter.

use crate::config::Config;
use crate::error::Result;
use crate::stored_model::StoredModel;
use crate::{folder, gguf};
use ringspan_candle::{StoredWeights, Weights};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A model with its own weights, as opposed to an adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Base {
    /// A folder in the layout of Hugging Face.
    Folder(PathBuf),
    /// A GGUF file.
    Gguf(PathBuf),
}

impl Base {
    /// The model at `path`: a GGUF file if it is a file, else a folder.
    pub fn at(path: PathBuf) -> Self {
        if path.is_file() { Self::Gguf(path) } else { Self::Folder(path) }
    }

    /// The path of the folder or file.
    pub fn path(&self) -> &Path {
        match self {
            Self::Folder(path) | Self::Gguf(path) => path,
        }
    }

    pub(crate) fn config_json(&self) -> Result<Value> {
        match self {
            Self::Folder(path) => folder::config_json(path),
            Self::Gguf(path) => gguf::config_json(path),
        }
    }

    /// The configuration, and the weights as f32.
    ///
    /// # Errors
    /// Files that are missing or corrupt.
    pub fn load(&self) -> Result<(Config, Weights)> {
        match self {
            Self::Folder(path) => folder::load(path),
            Self::Gguf(path) => gguf::load(path),
        }
    }

    /// Opens the model, so that its parameters can be read one by one.
    ///
    /// # Errors
    /// Files that are missing or corrupt, and parameters that are missing, unknown or of another shape or type.
    pub fn open(&self) -> Result<StoredModel> {
        match self {
            Self::Folder(path) => folder::open(path).map(StoredModel::Folder),
            Self::Gguf(path) => gguf::GgufModel::open(path).map(StoredModel::Gguf),
        }
    }

    /// The configuration, and the weights, with matrices as the files store them.
    ///
    /// # Errors
    /// Files that are missing or corrupt.
    pub fn load_stored(&self) -> Result<(Config, StoredWeights)> {
        let model = self.open()?;
        Ok((model.config().clone(), model.read_all()?))
    }
}

/// A hint to download the model if `path` looks like a name on the Hugging Face Hub; else an empty text.
pub(crate) fn download_hint(path: &Path) -> String {
    let text = path.to_string_lossy();
    let Some((owner, name)) = text.split_once('/') else { return String::new() };
    let plain = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    if !plain(owner) || !plain(name) || Path::new(owner).exists() {
        return String::new();
    }
    format!(
        "; if {text} is a model of the Hugging Face Hub, download it first (`hf download {text} --local-dir {name}`, of the Python \
         package huggingface_hub), and name that folder"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_told_from_paths() {
        let hint = download_hint(Path::new("Qwen/Qwen3-0.6B"));
        assert!(hint.contains("`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`"), "{hint}");
        for path in
            ["Qwen3-0.6B", "/models/Qwen", "./Qwen/Qwen3", "../a/b", "a/b/c", "a/", "src/no-such-model", "a/b c"]
        {
            assert_eq!(download_hint(Path::new(path)), "", "{path}");
        }
        let refused = crate::ModelSource::at(Path::new("nobody-here/Qwen3-0.6B")).expect_err("not here").to_string();
        assert!(refused.contains("no such folder") && refused.contains("hf download nobody-here/"), "{refused}");
    }
}
