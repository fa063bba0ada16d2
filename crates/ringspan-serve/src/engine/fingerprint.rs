//! Fingerprints of models and adapters, by which a session knows whose keys and values it has.

use std::fs::File;
use std::io::{Read, Result, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Parts of a large file that are read, and bytes of each.
const PARTS: u64 = 256;
const PART: u64 = 4096;

/// A fingerprint of a file, or of the configurations and weights in a folder: their names, sizes, and contents, of which large
/// files are read in parts. Another path to the same files has the same fingerprint.
///
/// # Errors
/// Files that cannot be read.
pub fn fingerprint(path: &Path) -> Result<String> {
    let mut files = vec![path.to_owned()];
    if path.is_dir() {
        files = std::fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>>>()?;
        files.retain(|file| {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            name == "config.json" || name == "adapter_config.json" || name.ends_with(".safetensors")
        });
        files.sort();
    }
    let (mut crc, mut bytes) = (crc32fast::Hasher::new(), 0);
    for path in &files {
        let mut file = File::open(path)?;
        let size = file.metadata()?.len();
        // A single file may have any name.
        let name = if files.len() > 1 { path.file_name().unwrap_or_default() } else { Default::default() };
        crc.update(name.as_encoded_bytes());
        crc.update(&size.to_le_bytes());
        bytes += size;
        let parts = if size <= PARTS * PART { 1 } else { PARTS };
        let length = if parts == 1 { size } else { PART };
        for part in 0..parts {
            let at = if parts == 1 { 0 } else { (size - PART) / (parts - 1) * part };
            file.seek(SeekFrom::Start(at))?;
            let mut content = Vec::new();
            file.by_ref().take(length).read_to_end(&mut content)?;
            crc.update(&content);
        }
    }
    Ok(format!("{} files of {bytes} bytes, {:08x}", files.len(), crc.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_weight_is_another_fingerprint_and_another_path_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |to: &str, byte: u8| {
            let to = folder.path().join(to);
            std::fs::create_dir_all(&to).expect("a folder");
            std::fs::write(to.join("config.json"), "{}").expect("a file");
            std::fs::write(to.join("model.safetensors"), vec![byte; 3 << 20]).expect("a file");
            std::fs::write(to.join("notes.txt"), [byte]).expect("a file");
            fingerprint(&to).expect("files")
        };
        let (one, same, other) = (write("one", 1), write("same", 1), write("other", 2));
        assert_eq!(one, same);
        assert_ne!(one, other);
        std::fs::write(folder.path().join("same/config.json"), "{} ").expect("a file");
        assert_ne!(fingerprint(&folder.path().join("same")).expect("files"), one);
        assert!(fingerprint(&folder.path().join("nowhere")).is_err());
    }
}
