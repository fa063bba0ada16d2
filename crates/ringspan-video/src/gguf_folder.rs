//! Which GGUF file a folder has in the place of safetensors.

use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// Whether this is the name of a GGUF file.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|found| found.eq_ignore_ascii_case("gguf"))
}

/// The GGUF file of a folder, if it has one; `stem` is that of the folder's safetensors.
///
/// # Errors
/// Several GGUF files, and weights in both formats.
pub(crate) fn gguf_of(folder: &Path, stem: &str) -> Result<Option<PathBuf>> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(None) };
    let mut files: Vec<PathBuf> =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| is_gguf(path)).collect();
    files.sort();
    let names = |files: &[PathBuf]| {
        let names = files.iter().filter_map(|file| Some(file.file_name()?.to_string_lossy().into_owned()));
        names.collect::<Vec<_>>().join(", ")
    };
    let refuse = |problem: String| Err(Error::Format { path: folder.to_owned(), problem });
    let others = ["safetensors", "safetensors.index.json"].map(|end| folder.join(format!("{stem}.{end}")));
    match (files.as_slice(), others.into_iter().find(|file| file.is_file())) {
        ([], _) => Ok(None),
        ([one], None) => Ok(Some(one.clone())),
        (several, None) => {
            refuse(format!("there are several GGUF files ({}), of which one is possible", names(several)))
        }
        (files, Some(other)) => refuse(format!("there are weights twice: {} and {}", names(files), names(&[other]))),
    }
}
