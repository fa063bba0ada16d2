//! Lets one process make a token file, while others that want the same one wait for it.

use crate::{
    data::progress::Progress,
    error::{Error, Result},
};
use std::{
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Time between two tries to take the lock.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// The right to make a token file, which ends when this is dropped.
pub(in crate::data) struct CacheLock {
    /// None where the file system has no locks: then each process makes a file of its own, and the last one to be renamed stays.
    lock: Option<File>,
    path: PathBuf,
}

impl Drop for CacheLock {
    fn drop(&mut self) {
        if self.lock.is_some() {
            // A process that waits for this lock has its file open, and looks for the tokens before making them.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Waits for the turn to make the file for `key` in `folder`, which exists, as long as the process that has the turn goes on
/// writing. The lock is the operating system's, so a process that dies releases it.
///
/// # Errors
/// [`Error::Data`] once nothing was written for `deadline`, [`Error::Io`] when the system refuses a file, [`Error::Interrupted`]
/// where `progress` ends the reading.
pub(in crate::data) fn lock_token_file(
    folder: &Path,
    key: u64,
    deadline: Duration,
    progress: &Progress<'_>,
) -> Result<CacheLock> {
    let path = folder.join(format!(".tokens-{key:016x}.lock"));
    let open = || {
        let opened = File::options().read(true).write(true).create(true).truncate(false).open(&path);
        opened.map_err(Error::io("write", &path))
    };
    let mut file = open()?;
    let (mut seen, mut since) = (0, Instant::now());
    loop {
        match file.try_lock() {
            Ok(()) if is_same_file(&file, &path) => break,
            // The previous owner has removed this lock file: a new one is opened.
            Ok(()) => {
                file = open()?;
                continue;
            }
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(_)) => return Ok(CacheLock { lock: None, path }),
        }
        let size = unfinished_bytes(folder, key);
        if size != seen {
            (seen, since) = (size, Instant::now());
        }
        if since.elapsed() > deadline {
            let problem = format!(
                "another process makes the tokens of this text and has written nothing for {} seconds (--deadline); end it, or \
                 give this one a folder of its own with --token-cache",
                deadline.as_secs_f64()
            );
            return Err(Error::Data { path: folder.into(), problem });
        }
        progress.report()?;
        std::thread::sleep(RETRY_INTERVAL);
    }
    remove_unfinished(folder, key);
    Ok(CacheLock { lock: Some(file), path })
}

/// Whether an open file is the one at `path`.
#[cfg(unix)]
fn is_same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    file.metadata().map(id).ok() == path.metadata().map(id).ok()
}

#[cfg(not(unix))]
fn is_same_file(_: &File, path: &Path) -> bool {
    path.exists()
}

/// The unfinished token files of a key.
fn unfinished_files(folder: &Path, key: u64) -> impl Iterator<Item = fs::DirEntry> {
    let begin = format!(".tokens-{key:016x}.");
    let ours = move |entry: &fs::DirEntry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.starts_with(&begin) && name.ends_with(".part")
    };
    fs::read_dir(folder).into_iter().flatten().flatten().filter(ours)
}

/// Bytes of a key's unfinished files.
fn unfinished_bytes(folder: &Path, key: u64) -> u64 {
    unfinished_files(folder, key).filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.len()).sum()
}

/// Removes the unfinished files of a process that was killed.
fn remove_unfinished(folder: &Path, key: u64) {
    unfinished_files(folder, key).for_each(|entry| drop(fs::remove_file(entry.path())));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::progress::ignore_progress;

    fn lock(folder: &Path, key: u64, deadline: Duration) -> Result<CacheLock> {
        lock_token_file(folder, key, deadline, &Progress::new(&ignore_progress, folder, 0))
    }

    #[test]
    fn one_holds_the_lock_and_others_wait_until_it_is_released() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let first = lock(path, 7, Duration::from_secs(9)).unwrap();
        let message = lock(path, 7, Duration::from_millis(120)).err().unwrap().to_string();
        assert!(message.contains("another process makes the tokens") && message.contains("--deadline"), "{message}");
        drop(lock(path, 8, Duration::from_millis(120)).unwrap());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| lock(path, 7, Duration::from_secs(30)).map(drop));
            std::thread::sleep(Duration::from_millis(150));
            assert!(!waiting.is_finished());
            drop(first);
            waiting.join().unwrap().unwrap();
        });
        assert_eq!(fs::read_dir(path).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn a_writer_is_waited_for_and_files_of_a_killed_one_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let part = path.join(".tokens-0000000000000007.1.part");
        let first = lock(path, 7, Duration::from_secs(9)).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| lock(path, 7, Duration::from_millis(400)).map(drop));
            for size in 1..12 {
                std::thread::sleep(Duration::from_millis(100));
                fs::write(&part, vec![0; size]).unwrap();
            }
            drop(first);
            waiting.join().unwrap().unwrap();
        });
        assert!(!part.exists());
    }
}
