//! What Ctrl-C does: it never leaves half a file behind, and a command that asks for it may finish its step first.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Set by Ctrl-C in commands that stop by themselves.
static STOP: AtomicBool = AtomicBool::new(false);
/// Whether the running command looks at [`STOP`].
static GRACEFUL: AtomicBool = AtomicBool::new(false);
/// Whether a launcher ends this process when another one fails, so that there may be an error to tell first.
static LEAVE_TIME: AtomicBool = AtomicBool::new(false);
/// Files that are being written beside their target.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Less than launchers leave between asking a process to end and ending it.
const LAST_WORDS: Duration = Duration::from_millis(700);

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
            std::thread::sleep(LAST_WORDS);
        }
        let unfinished = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
        for path in unfinished.iter() {
            let _ = std::fs::remove_file(path);
        }
        if !several {
            eprintln!("\ninterrupted");
        }
        // The lock is held to the end, so no rename can put a half-deleted list in place of a file.
        std::process::exit(INTERRUPTED);
    })?;
    Ok(())
}

/// From now on a signal that ends the program leaves it a moment for the error it may be about.
#[cfg(feature = "mpi")]
pub(crate) fn leave_time() {
    LEAVE_TIME.store(true, Ordering::SeqCst);
}

/// From now on the first Ctrl-C only sets the flag returned here; the second ends the program.
pub(crate) fn watch() -> &'static AtomicBool {
    GRACEFUL.store(true, Ordering::SeqCst);
    &STOP
}

/// A file that is deleted if the program is interrupted or the value is dropped before [`Unfinished::keep_as`].
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

    /// Puts the finished file in the place of `target`.
    pub(crate) fn keep_as(self, target: &Path) -> std::io::Result<()> {
        let _guard = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
        std::fs::rename(&self.path, target)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        let mut unfinished = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
        unfinished.retain(|path| *path != self.path);
    }
}
