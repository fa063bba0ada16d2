//! The location of a parameter in the files of a model's folder.

use safetensors::Dtype;
use std::path::PathBuf;

/// The location of a parameter: its file, and its offset there.
#[derive(Debug, Clone)]
pub(super) struct StoredParameter {
    pub(super) file: PathBuf,
    pub(super) dtype: Dtype,
    /// Offset of its first byte in the file.
    pub(super) start: u64,
    pub(super) shape: Vec<usize>,
    /// For a parameter in MXFP4: the location of its exponents; its codes are at `start`.
    pub(super) exponents: Option<Box<Self>>,
}
