//! Ctrl-C: it never leaves half a file behind, and a command may choose to finish its step first.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Set by the first Ctrl-C in commands that stop by themselves.
static STOP: AtomicBool = AtomicBool::new(false);
/// Whether the running command watches [`STOP`].
static GRACEFUL: AtomicBool = AtomicBool::new(false);
/// Whether a launcher ends this process when another one fails, in which case an error may have to be printed first.
static LEAVE_TIME: AtomicBool = AtomicBool::new(false);
/// Temporary files that are being written.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

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
        let unfinished = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
        unfinished.iter().for_each(|path| remove(path));
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

/// Deletes a file, or a folder with all its files, if it is there.
fn remove(path: &Path) {
    if std::fs::remove_file(path).is_err() {
        let _ = std::fs::remove_dir_all(path);
    }
}

/// A file or folder that is deleted if the program is interrupted or the value is dropped before [`Unfinished::keep_as`].
pub(crate) struct Unfinished {
    path: PathBuf,
}

impl Unfinished {
    /// Registers `path`, which is about to be created.
    pub(crate) fn new(path: PathBuf) -> Self {
        UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).push(path.clone());
        Self { path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the finished file to `target`.
    pub(crate) fn keep_as(self, target: &Path) -> std::io::Result<()> {
        let _guard = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
        std::fs::rename(&self.path, target)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        remove(&self.path);
        let mut unfinished = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
        unfinished.retain(|path| *path != self.path);
    }
}
