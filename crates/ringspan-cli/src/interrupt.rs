//! Ctrl-C: it never leaves half a file behind, and a command may choose to finish its step first.

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
        let _ = match self {
            Self::File(path) => std::fs::remove_file(path),
            Self::Folder(path) => std::fs::remove_dir_all(path),
        };
    }
}

/// A file or folder that is deleted if the program is interrupted or the value is dropped before it is kept.
pub(crate) struct Unfinished {
    output: Output,
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
        Self { output }
    }

    pub(crate) fn path(&self) -> &Path {
        self.output.path()
    }

    /// Renames the finished file or folder to `target`.
    pub(crate) fn keep_as(self, target: &Path) -> std::io::Result<()> {
        let _guard = unfinished();
        std::fs::rename(self.path(), target)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let mut unfinished = unfinished();
        self.output.remove();
        unfinished.retain(|output| *output != self.output);
    }
}
