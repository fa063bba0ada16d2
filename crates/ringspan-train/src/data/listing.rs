//! Lists the files of a source, and tells two states of them apart without reading them whole.

use super::{Skipped, progress::Progress};
use crate::{
    error::{Error, Result},
    fingerprint::Fingerprint,
    settings::RUN_FILE,
};
use ringspan_models::adapter;
use std::{
    fs::{File, Metadata},
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::UNIX_EPOCH,
};

/// Bytes at the beginning, the middle and the end of a file that are its sample.
const SAMPLE_BYTES: u64 = 4 << 10;

/// A file of a source.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// Path below the folder, with `/` on every system, since the split into training and held-out documents hashes the name; or
    /// the file's name.
    pub(super) name: String,
    pub(super) path: PathBuf,
    metadata: Metadata,
}

/// The files of a source, sorted by name.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) root: PathBuf,
    pub(super) is_folder: bool,
    pub(super) entries: Vec<Entry>,
    /// Folders and links that were left out.
    pub(super) skipped: Skipped,
}

impl Listing {
    /// Lists the file at `path`, or the files of that folder. Hidden files, files that `.gitignore` or `.ignore` name, folders of
    /// models and runs, and `exclude`, with everything below, are left out.
    pub(super) fn new(path: &Path, exclude: &[PathBuf]) -> Result<Self> {
        let metadata = std::fs::metadata(path).map_err(Error::io("read", path))?;
        let (root, skipped) = (path.to_owned(), Skipped::default());
        if metadata.is_dir() {
            let mut listing = Self { root, is_folder: true, entries: Vec::new(), skipped };
            listing.walk(exclude)?;
            return Ok(listing);
        }
        let name = path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned());
        Ok(Self { root, is_folder: false, entries: vec![Entry { name, path: path.into(), metadata }], skipped })
    }

    fn walk(&mut self, exclude: &[PathBuf]) -> Result<()> {
        let exclude: Vec<PathBuf> = exclude.iter().filter_map(|p| p.canonicalize().ok()).collect();
        let models = std::sync::Arc::new(Mutex::new(Vec::new()));
        let found = models.clone();
        let walk = ignore::WalkBuilder::new(&self.root)
            .require_git(false)
            // A user's global ignore file must not change the data of a run.
            .git_global(false)
            .filter_entry(move |entry| {
                let path = entry.path();
                if entry.depth() == 0 || path.canonicalize().is_ok_and(|p| exclude.contains(&p)) {
                    return entry.depth() == 0;
                }
                let model = entry.file_type().is_some_and(|t| t.is_dir()) && is_model_folder(path);
                if model {
                    found.lock().unwrap_or_else(PoisonError::into_inner).push(path.to_owned());
                }
                !model
            })
            .build();
        for entry in walk {
            let wrong = |problem: String| Error::Data { path: self.root.clone(), problem };
            let entry = entry.map_err(|e| wrong(e.to_string()))?;
            if entry.file_type().is_none_or(|t| t.is_dir()) {
                continue;
            }
            let (name, path) = (self.relative_name(entry.path()), entry.path().to_owned());
            // A link to a file counts as the file, as in caches of data sets.
            match std::fs::metadata(&path) {
                Ok(metadata) if metadata.is_file() => self.entries.push(Entry { name, path, metadata }),
                Ok(metadata) if metadata.is_dir() => self.skipped.add("links to folders", &name),
                Ok(_) => self.skipped.add("neither files nor folders", &name),
                Err(_) => self.skipped.add("broken links", &name),
            }
        }
        let mut models = std::mem::take(&mut *models.lock().unwrap_or_else(PoisonError::into_inner));
        models.sort();
        models.iter().for_each(|path| self.skipped.add("folders of a model or run", &self.relative_name(path)));
        self.entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(())
    }

    fn relative_name(&self, path: &Path) -> String {
        let relative = path.strip_prefix(&self.root).unwrap_or(path);
        relative.iter().map(|p| p.to_string_lossy()).collect::<Vec<_>>().join("/")
    }

    /// A hash of the files' paths, sizes and times, and of a sample of their content.
    pub(super) fn identity(&self) -> Result<u64> {
        let mut hash = Fingerprint::new();
        let root = self.root.canonicalize().map_err(Error::io("read", &self.root))?;
        hash.push_bytes(root.as_os_str().as_encoded_bytes());
        for entry in &self.entries {
            hash.push_bytes(entry.name.as_bytes());
            hash.push(entry.metadata.len());
            let modified = entry.metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            hash.push(modified.map_or(0, |since| since.as_nanos() as u64));
            entry.hash_sample(&mut hash)?;
        }
        Ok(hash.finish())
    }

    /// Bytes of all files, as they are stored.
    pub(super) fn bytes(&self) -> u64 {
        self.entries.iter().map(Entry::bytes).sum()
    }

    /// A hash of every byte of the files.
    pub(super) fn contents_hash(&self, progress: &Progress<'_>) -> Result<u64> {
        let mut hash = Fingerprint::new();
        let mut buffer = vec![0; 1 << 20];
        for entry in &self.entries {
            hash.push_bytes(entry.name.as_bytes());
            let mut file = File::open(&entry.path).map_err(Error::io("read", &entry.path))?;
            loop {
                let count = read_full(&mut file, &mut buffer).map_err(Error::io("read", &entry.path))?;
                hash.push_bytes(&buffer[..count]);
                progress.report()?;
                if count < buffer.len() {
                    break;
                }
            }
        }
        Ok(hash.finish())
    }
}

impl Entry {
    /// Bytes of the file, as it is stored.
    pub(super) fn bytes(&self) -> u64 {
        self.metadata.len()
    }

    fn hash_sample(&self, hash: &mut Fingerprint) -> Result<()> {
        let size = self.metadata.len();
        let offsets: &[u64] = match size {
            0 => &[],
            1..=SAMPLE_BYTES => &[0],
            _ => &[0, (size - SAMPLE_BYTES) / 2, size - SAMPLE_BYTES],
        };
        let mut file = File::open(&self.path).map_err(Error::io("read", &self.path))?;
        let mut buffer = vec![0; SAMPLE_BYTES as usize];
        for &offset in offsets {
            let read = file.seek(SeekFrom::Start(offset)).and_then(|_| read_full(&mut file, &mut buffer));
            hash.push_bytes(&buffer[..read.map_err(Error::io("read", &self.path))?]);
        }
        Ok(())
    }
}

/// Reads until the buffer is full or the file ends.
fn read_full(from: &mut impl Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut count = 0;
    while count < buffer.len() {
        match from.read(&mut buffer[count..]) {
            Ok(0) => break,
            Ok(more) => count += more,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

/// Whether a folder holds a model or a run: its JSON is no prose, and its metrics are no data.
fn is_model_folder(path: &Path) -> bool {
    ["model.safetensors", "model.safetensors.index.json", adapter::CONFIG, RUN_FILE]
        .iter()
        .any(|name| path.join(name).exists())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::ignore_progress;
    use std::time::{Duration, SystemTime};

    #[test]
    fn the_identity_is_of_paths_sizes_times_and_a_sample_and_the_contents_of_every_byte() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        let time = SystemTime::now() - Duration::from_secs(60);
        let write = |bytes: &[u8], time: SystemTime| {
            std::fs::write(&path, bytes).unwrap();
            File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        };
        let both = || {
            let listing = Listing::new(folder.path(), &[]).unwrap();
            (
                listing.identity().unwrap(),
                listing.contents_hash(&Progress::new(&ignore_progress, folder.path(), 0)).unwrap(),
            )
        };
        let mut bytes = b"a word; ".repeat(10_000);
        write(&bytes, time);
        let first = both();
        assert_eq!(both(), first);
        // A byte is changed where no sample is taken.
        bytes[20_000] ^= 1;
        write(&bytes, time);
        let unsampled = both();
        assert_eq!(unsampled.0, first.0);
        assert_ne!(unsampled.1, first.1);
        for at in [0, 40_000, 79_999] {
            let mut sampled = bytes.clone();
            sampled[at] ^= 1;
            write(&sampled, time);
            assert_ne!(both().0, first.0, "byte {at}");
        }
        write(&bytes, time + Duration::from_millis(1));
        assert_ne!(both().0, first.0, "another time");
        std::fs::rename(&path, folder.path().join("b.txt")).unwrap();
        assert_ne!(both().1, unsampled.1, "another name");
        std::fs::write(folder.path().join("empty"), "").unwrap();
        both();
    }

    #[cfg(unix)]
    #[test]
    fn a_link_to_a_file_is_that_file_and_one_to_a_folder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        std::fs::write(elsewhere.path().join("blob"), "words").unwrap();
        let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, folder.path().join(name)).unwrap();
        link(&elsewhere.path().join("blob"), "a.txt");
        link(elsewhere.path(), "more");
        link(&elsewhere.path().join("nothing"), "broken");
        let listing = Listing::new(folder.path(), &[]).unwrap();
        assert_eq!(listing.entries.iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>(), ["a.txt"]);
        assert_eq!(listing.skipped.describe().unwrap(), "not read: 1 broken links (broken), 1 links to folders (more)");
    }
}
