//! Safetensors files whose tensors stay on disk: the header is read and checked against the size of the file.

use crate::error::{Error, Result};
use safetensors::tensor::Metadata;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

/// An open safetensors file with its parsed header.
#[derive(Debug)]
pub struct TensorFile {
    /// The file, positioned at the first byte after its header.
    pub file: File,
    /// Types, shapes and offsets of the tensors, which fill the file without gaps, and the file's free-form metadata.
    pub metadata: Metadata,
    /// Byte of the file from which the offsets count.
    pub data: u64,
}

impl TensorFile {
    /// Longest header that is read, in bytes; the limit of the safetensors library.
    const MAX_HEADER: u64 = 100_000_000;

    /// Returns why a header of this many bytes must not be written, if it is too long for readers.
    pub fn refused(header: usize) -> Option<String> {
        let most = Self::MAX_HEADER;
        (header as u64 > most).then(|| format!("its header would have {header} bytes; the most that is read is {most}"))
    }

    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// Failures of the file system, and a file that has no header, or not the length that its header implies.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let broken = |problem: &str| Error::Format {
            path: path.to_owned(),
            problem: format!("not a whole safetensors file of {length} bytes: {problem}"),
        };
        // Only a file that ends too early is malformed; other failures to read it say nothing about its content.
        let short = |source: std::io::Error, problem: &str| match source.kind() {
            ErrorKind::UnexpectedEof => broken(problem),
            _ => io(source),
        };
        let mut bytes = [0; 8];
        file.read_exact(&mut bytes).map_err(|error| short(error, "it is shorter than the length of a header"))?;
        let header = u64::from_le_bytes(bytes);
        if header > Self::MAX_HEADER.min(length) {
            return Err(broken(&format!("a header of {header} bytes")));
        }
        let mut text = vec![0; header as usize];
        file.read_exact(&mut text).map_err(|error| short(error, "it ends inside its header"))?;
        let metadata: Metadata = serde_json::from_slice(&text).map_err(|error| broken(&error.to_string()))?;
        let data = 8 + header;
        if data.checked_add(metadata.data_len() as u64) != Some(length) {
            return Err(broken(&format!("its header speaks of {} bytes of data", metadata.data_len())));
        }
        Ok(Self { file, metadata, data })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(bytes: &[u8]) -> Error {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), bytes).expect("written");
        TensorFile::open(file.path()).expect_err("must be refused")
    }

    #[test]
    fn a_truncated_file_is_refused() {
        for (bytes, words) in [
            (&[0u8; 7][..], "shorter than the length of a header"),
            (&[&9u64.to_le_bytes()[..], &[b' '; 3]].concat(), "ends inside its header"),
            (&[&100_000_001u64.to_le_bytes()[..], &[b' '; 9]].concat(), "a header of 100000001 bytes"),
        ] {
            let error = open(bytes);
            assert!(matches!(&error, Error::Format { problem, .. } if problem.contains(words)), "{error}");
        }
    }

    /// A folder can be opened like a file, but not read.
    #[cfg(unix)]
    #[test]
    fn an_unreadable_file_is_reported_with_the_error_of_the_system() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = TensorFile::open(folder.path()).expect_err("no file");
        assert!(matches!(&error, Error::Io { path, .. } if path == folder.path()), "{error}");
    }
}
