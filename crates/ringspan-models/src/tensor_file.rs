//! Safetensors files whose tensors stay on disk: the header is read and checked against the size of the file.

use crate::error::{Error, Result};
use safetensors::tensor::Metadata;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Longest header that is read; the limit of the format's own library.
const MAX_HEADER: u64 = 100_000_000;

/// An open file, and what its header says.
#[derive(Debug)]
pub struct TensorFile {
    /// The file, behind its header.
    pub file: File,
    /// Types, shapes and places of the tensors, which fill the file without gaps, and words about it.
    pub metadata: Metadata,
    /// Byte of the file from which places are counted.
    pub data: u64,
}

impl TensorFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// What the file system says, and a file that is not as long as its header says, or has none.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let broken = |problem: &str| Error::Format {
            path: path.to_owned(),
            problem: format!("not a whole safetensors file of {length} bytes: {problem}"),
        };
        let mut bytes = [0; 8];
        file.read_exact(&mut bytes).map_err(|_| broken("it is shorter than the length of a header"))?;
        let header = u64::from_le_bytes(bytes);
        if header > MAX_HEADER.min(length) {
            return Err(broken(&format!("a header of {header} bytes")));
        }
        let mut text = vec![0; header as usize];
        file.read_exact(&mut text).map_err(|_| broken("it ends inside its header"))?;
        let metadata: Metadata = serde_json::from_slice(&text).map_err(|error| broken(&error.to_string()))?;
        let data = 8 + header;
        if data.checked_add(metadata.data_len() as u64) != Some(length) {
            return Err(broken(&format!("its header speaks of {} bytes of data", metadata.data_len())));
        }
        Ok(Self { file, metadata, data })
    }
}
