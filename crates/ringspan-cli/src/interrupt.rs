//! Ctrl-C: it never leaves half a file behind, and a command may choose to finish its step first.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Set by the first Ctrl-C in commands that stop by themselves.
static STOP: AtomicBool = AtomicBool::new(false);
/// Whether the running command watches [`STOP`].
static GRACEFUL: AtomicBool = AtomicBool::new(false);
/// Whether a launcher ends this process when another one fails, in which case an error may have to be printed first.
static LEAVE_TIME: AtomicBool = AtomicBool::new(false);
/// Temporary files and folders that are being written.
static UNFINISHED: Mutex<Vec<Output>> = Mutex::new(Vec::new());

/// Time to print an error: less than launchers wait between asking a process to end and killing it.
const ERROR_PRINT_TIME: Duration = Duration::from_millis(700);

/// The exit code of a program ended by Ctrl-C: 128 + SIGINT.
const INTERRUPTED: i32 = 130;

/// How often deleting a folder is tried, and the time between, in which a write that had begun ends.
const REMOVE_TRIES: usize = 100;
const REMOVE_INTERVAL: Duration = Duration::from_millis(5);

/// Installs the handler. It runs on a thread of its own, so it may lock and delete files.
pub(crate) fn install() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        if GRACEFUL.load(Ordering::SeqCst) && !STOP.swap(true, Ordering::SeqCst) {
            eprintln!("\nstopping as soon as nothing is lost by it; Ctrl-C again stops at once");
            return;
        }
        let several = LEAVE_TIME.load(Ordering::SeqCst);
        if several {
            std::thread::sleep(ERROR_PRINT_TIME);
        }
        let unfinished = unfinished();
        unfinished.iter().for_each(Output::remove);
        if !several {
            eprintln!("\ninterrupted");
        }
        // The lock is held until the process ends, so no thread can rename a deleted or half-written file to its target.
        std::process::exit(INTERRUPTED);
    })?;
    Ok(())
}

/// From this call on, a signal that ends the program leaves it a moment to print the error that may be its cause.
#[cfg(feature = "mpi")]
pub(crate) fn leave_time() {
    LEAVE_TIME.store(true, Ordering::SeqCst);
}

/// From this call on, the first Ctrl-C only sets the flag returned here; the second ends the program.
pub(crate) fn watch() -> &'static AtomicBool {
    GRACEFUL.store(true, Ordering::SeqCst);
    &STOP
}

fn unfinished() -> MutexGuard<'static, Vec<Output>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Output {
    File(PathBuf),
    /// A folder that this program made.
    Folder(PathBuf),
}

impl Output {
    fn path(&self) -> &Path {
        match self {
            Self::File(path) | Self::Folder(path) => path,
        }
    }

    /// Deletes the file, or the folder with all its files, if it is there.
    fn remove(&self) {
        match self {
            Self::File(path) => {
                let _ = std::fs::remove_file(path);
            }
            Self::Folder(path) => remove_folder(path),
        }
    }
}

/// Deletes a folder into which another thread may still write. It is renamed first, after which that thread can create no more
/// files there; one that it was just creating may appear while the folder is deleted, so deleting is repeated.
fn remove_folder(path: &Path) {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".removed");
    let aside = PathBuf::from(aside);
    let path = if std::fs::rename(path, &aside).is_ok() { &aside } else { path };
    for _ in 0..REMOVE_TRIES {
        match std::fs::remove_dir_all(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => std::thread::sleep(REMOVE_INTERVAL),
            _ => return,
        }
    }
}

/// A file or folder that is deleted if the program is interrupted or the value is dropped before it is kept.
pub(crate) struct Unfinished {
    output: Output,
    is_kept: bool,
}

impl Unfinished {
    /// Registers a file, which is about to be created.
    pub(crate) fn file(path: PathBuf) -> Self {
        Self::register(Output::File(path), &mut unfinished())
    }

    /// Creates a folder and registers it. A folder that is there already is an error, and stays as it is.
    pub(crate) fn folder(path: PathBuf) -> std::io::Result<Self> {
        // With the lock, an interrupt comes either before the folder is there or after it is registered.
        let mut unfinished = unfinished();
        std::fs::create_dir(&path)?;
        Ok(Self::register(Output::Folder(path), &mut unfinished))
    }

    fn register(output: Output, unfinished: &mut Vec<Output>) -> Self {
        unfinished.push(output.clone());
        Self { output, is_kept: false }
    }

    pub(crate) fn path(&self) -> &Path {
        self.output.path()
    }

    /// The file or folder stays, under the name that it has.
    pub(crate) fn keep(mut self) {
        self.is_kept = true;
    }

    /// Renames the finished file or folder to `target`.
    pub(crate) fn keep_as(self, target: &Path) -> std::io::Result<()> {
        let _guard = unfinished();
        std::fs::rename(self.path(), target)
    }

    /// Moves the files of the finished folder into the empty folder in which it is. If that fails, none is there.
    pub(crate) fn keep_in(self, target: &Path) -> std::io::Result<()> {
        let _guard = unfinished();
        let mut moved = Vec::new();
        let result = move_files(self.path(), target, &mut moved);
        if result.is_err() {
            moved.iter().for_each(|path| drop(std::fs::remove_file(path)));
        }
        result
    }
}

/// Moves all files of a folder, and notes where they are now. No file is replaced.
fn move_files(from: &Path, target: &Path, moved: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let to = target.join(entry.file_name());
        if to.symlink_metadata().is_ok() {
            return Err(std::io::Error::new(ErrorKind::AlreadyExists, format!("{} is there already", to.display())));
        }
        std::fs::rename(entry.path(), &to)?;
        moved.push(to);
    }
    Ok(())
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let mut unfinished = unfinished();
        if !self.is_kept {
            self.output.remove();
        }
        unfinished.retain(|output| *output != self.output);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_deleted_while_a_thread_fills_it() {
        let parent = tempfile::tempdir().expect("folder");
        let path = parent.path().join("out");
        for _ in 0..20 {
            std::fs::create_dir(&path).expect("folder");
            std::thread::scope(|scope| {
                let write = |index: usize| std::fs::write(path.join(index.to_string()), "1").is_ok();
                let writer = scope.spawn(move || (0..1_000_000).take_while(|index| write(*index)).count());
                std::thread::sleep(Duration::from_millis(3));
                remove_folder(&path);
                assert!(writer.join().expect("no panic") < 1_000_000);
            });
            assert_eq!(std::fs::read_dir(parent.path()).expect("folder").count(), 0);
        }
    }
}
