//! Lines for standard output. A reader that has gone away (as in `| head`) is not a failure.

use std::fmt::Display;
use std::io::{ErrorKind, Result, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether another process prints the results of this one.
static SILENT: AtomicBool = AtomicBool::new(false);

/// Stops this process from writing results, because it is not rank 0.
#[cfg(feature = "mpi")]
pub(crate) fn be_silent() {
    SILENT.store(true, Ordering::SeqCst);
}

/// Writes a line to standard error in one piece, since the streams of several processes may be merged.
pub(crate) fn error(text: &str) {
    let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// An error and its causes, in one line. Many errors include their cause in their text; then it is not repeated.
pub(crate) fn with_causes(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Writes a line to standard error, unless another process writes it for all.
pub(crate) fn note(text: impl Display) {
    if !SILENT.load(Ordering::SeqCst) {
        error(&text.to_string());
    }
}

/// Writes `text` as it is, and flushes it.
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

#[cfg(test)]
mod tests {
    use super::with_causes;
    use anyhow::Context;

    /// An error whose text includes its cause, as with many libraries.
    #[derive(Debug)]
    struct ErrorWithCause {
        source: std::io::Error,
    }

    impl std::fmt::Display for ErrorWithCause {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "cannot read a.txt: {}", self.source)
        }
    }

    impl std::error::Error for ErrorWithCause {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&self.source)
        }
    }

    #[test]
    fn a_cause_is_said_once_whether_the_error_says_it_or_not() {
        let told = || ErrorWithCause { source: std::io::Error::from_raw_os_error(2) };
        let system = std::io::Error::from_raw_os_error(2).to_string();
        assert_eq!(with_causes(&told().into()), format!("cannot read a.txt: {system}"));
        let outer = Err::<(), _>(told()).context("--data").expect_err("an error");
        assert_eq!(with_causes(&outer), format!("--data: cannot read a.txt: {system}"));
        let plain = Err::<(), _>(std::io::Error::from_raw_os_error(2)).context("cannot open b").expect_err("an error");
        assert_eq!(with_causes(&plain), format!("cannot open b: {system}"));
        let same = anyhow::anyhow!("it is gone").context("the disk");
        assert_eq!(with_causes(&same), "the disk: it is gone");
    }
}
