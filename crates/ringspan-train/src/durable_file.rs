//! Files that are whole or not there at all, also after a power failure.

use crate::error::{Error, Result};
use std::{
    fs::{self, File},
    io::Write,
    path::Path,
};

/// Writes a file under a temporary name and renames it: readers see the old file or the new one, never a part.
///
/// # Errors
/// [`Error::Io`]; then the old file is as it was.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let part = path.with_file_name(format!(".{name}.part"));
    let written = File::create(&part)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .map_err(Error::io("write", &part))
        .and_then(|()| fs::rename(&part, path).map_err(Error::io("write", path)));
    if written.is_err() {
        let _ = fs::remove_file(&part);
    } else if let Some(parent) = path.parent() {
        sync_folder(parent);
    }
    written
}

/// Flushes the entries of a folder, so that a rename in it survives a power failure. Not every system lets folders be
/// opened; where it does not, the rename is as durable as the system makes it.
pub(crate) fn sync_folder(path: &Path) {
    if let Ok(folder) = File::open(path) {
        let _ = folder.sync_all();
    }
}
