//! Lines for standard output. A reader that has gone away (`| head`) is no failure.

use std::fmt::Display;
use std::io::{ErrorKind, Result, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether another process speaks for this one.
static SILENT: AtomicBool = AtomicBool::new(false);

/// From now on this process writes no results: it is not rank 0.
#[cfg(feature = "mpi")]
pub(crate) fn be_silent() {
    SILENT.store(true, Ordering::SeqCst);
}

/// Writes a line to standard error, in one piece: the streams of several processes may flow together.
pub(crate) fn error(text: &str) {
    let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Writes a line to standard error that one process says for all.
pub(crate) fn note(text: impl Display) {
    if !SILENT.load(Ordering::SeqCst) {
        error(&text.to_string());
    }
}

/// Writes `text` as it is and shows it at once.
///
/// Returns whether there is still a reader.
pub(crate) fn write(text: &str) -> Result<bool> {
    if SILENT.load(Ordering::SeqCst) {
        return Ok(true);
    }
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

/// Writes a line.
pub(crate) fn line(text: impl Display) -> Result<()> {
    write(&format!("{text}\n")).map(drop)
}
