//! A model on disk whose parameters are read one by one, as they are asked for.

use crate::config::Config;
use crate::error::Result;
use crate::folder::Folder;
use crate::gguf::GgufModel;
use ringspan_candle::{StoredWeights, Weight};

/// A model on disk: its configuration, and its parameters on request, so that a process reads only what it
/// computes with.
#[derive(Debug)]
pub enum StoredModel {
    /// A folder in the layout of Hugging Face.
    Folder(Folder),
    /// A GGUF file.
    Gguf(GgufModel),
}

impl StoredModel {
    /// The model's sizes and switches.
    pub fn config(&self) -> &Config {
        match self {
            Self::Folder(folder) => folder.config(),
            Self::Gguf(file) => file.config(),
        }
    }

    /// Reads a parameter as layers compute with it: matrices stay as they are stored, everything else becomes f32.
    ///
    /// # Errors
    /// A parameter that does not exist, and failures of the file system.
    pub fn read(&self, name: &str) -> Result<Weight> {
        match self {
            Self::Folder(folder) => folder.read_stored(name),
            Self::Gguf(file) => file.read(name),
        }
    }

    /// Reads all parameters.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn read_all(&self) -> Result<StoredWeights> {
        let read = |name: &String| Ok((name.clone(), self.read(name)?));
        match self {
            Self::Folder(folder) => folder.shapes().keys().map(read).collect(),
            Self::Gguf(file) => file.names().map(read).collect(),
        }
    }
}
