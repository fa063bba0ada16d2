//! The tensors of a GGUF file whose model is none of the families here, under the names that the file has.

use super::file::GgufFile;
use crate::error::Result;
use candle_core::{Device, Tensor};
use ringspan_candle::Weight;
use std::path::Path;

/// A GGUF file as a list of tensors, which stay on disk.
#[derive(Debug)]
pub struct GgufTensors {
    file: GgufFile,
}

impl GgufTensors {
    /// Opens a file of a model of this architecture (`general.architecture`).
    ///
    /// # Errors
    /// A file that is missing or corrupt, and one of another architecture.
    pub fn open(path: &Path, architecture: &str) -> Result<Self> {
        let file = GgufFile::open(path)?;
        let found = file.metadata.get("general.architecture").and_then(|name| name.to_string().ok());
        match found {
            Some(found) if found == architecture => Ok(Self { file }),
            Some(other) => {
                Err(file.broken(&format!("general.architecture is {other}, and {architecture} is needed here")))
            }
            None => Err(file.broken(&format!("there is no general.architecture, and {architecture} is needed here"))),
        }
    }

    /// The names of the tensors, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.file.names()
    }

    /// The shape of a tensor, outermost dim first, if the file has it.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.file.shape(name)
    }

    /// Bytes that a tensor takes in memory as [`read_stored`](Self::read_stored) returns it.
    ///
    /// # Errors
    /// A tensor that does not exist, and rows that are not whole blocks of its type.
    pub fn stored_bytes(&self, name: &str) -> Result<u64> {
        self.file.stored_bytes(name)
    }

    /// Reads a tensor in f32.
    ///
    /// # Errors
    /// A tensor that does not exist or is of an unknown type, and failures of the file system.
    pub fn read(&self, name: &str) -> Result<Tensor> {
        self.file.tensor(name)
    }

    /// Reads some rows of a matrix in f32, `[rows.len(), columns]`; nothing else is read from disk.
    ///
    /// # Errors
    /// As for [`read`](Self::read), a tensor that is no matrix, and rows that it does not have.
    pub fn read_rows(&self, name: &str, rows: &[u32]) -> Result<Tensor> {
        let Some(&[count, columns]) = self.file.shape(name) else {
            let shape = self.file.shape(name);
            return Err(self.file.broken(&format!("tensor {name} has shape {shape:?}, and must be a matrix")));
        };
        let broken = |error: candle_core::Error| self.file.broken(&format!("tensor {name}: {error}"));
        let mut found = Vec::with_capacity(rows.len() * columns);
        for row in rows.iter().map(|row| *row as usize) {
            if row >= count {
                return Err(self.file.broken(&format!("tensor {name} has {count} rows, and no row {row}")));
            }
            let row = self.file.rows(name, row..row + 1)?.to_tensor().map_err(broken)?;
            found.extend(row.flatten_all().and_then(|row| row.to_vec1::<f32>()).map_err(broken)?);
        }
        Tensor::from_vec(found, (rows.len(), columns), &Device::Cpu).map_err(broken)
    }

    /// Reads a tensor as layers compute with it: a matrix as it is stored if there is a
    /// [`Format`](ringspan_candle::quantized::Format) of its type, everything else in f32.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn read_stored(&self, name: &str) -> Result<Weight> {
        match self.file.shape(name) {
            Some([_, _]) => self.file.matrix(name),
            _ => self.file.tensor(name).map(Weight::Dense),
        }
    }
}
