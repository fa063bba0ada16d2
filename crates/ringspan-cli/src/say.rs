//! Lines for standard output. A reader that has gone away (`| head`) is no failure.

use std::fmt::Display;
use std::io::{ErrorKind, Result, Write};

/// Writes `text` as it is and shows it at once.
///
/// Returns whether there is still a reader.
pub(crate) fn write(text: &str) -> Result<bool> {
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
