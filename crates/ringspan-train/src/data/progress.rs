//! Progress of tokenization, and whether to go on with it.

use crate::error::{Error, Result};
use std::{
    cell::Cell,
    io::Read,
    ops::ControlFlow,
    path::{Path, PathBuf},
    rc::Rc,
};

/// A function that receives how many bytes of a source's files are read, and how many they have, and that may end the reading.
pub type ProgressCallback<'a> = &'a (dyn Fn(u64, u64) -> ControlFlow<()> + Sync);

/// A [`ProgressCallback`] that lets every source be read to its end.
pub fn ignore_progress(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Counts the bytes that are read of a source, and reports them to its [`ProgressCallback`].
pub(super) struct Progress<'a> {
    callback: ProgressCallback<'a>,
    source: PathBuf,
    /// Bytes of all files, as they are stored.
    bytes: u64,
    /// Bytes of the files that were read to the end.
    finished_bytes: Cell<u64>,
    /// Bytes that were read of the open file.
    file_bytes: Rc<Cell<u64>>,
}

impl<'a> Progress<'a> {
    pub(super) fn new(callback: ProgressCallback<'a>, source: &Path, bytes: u64) -> Self {
        Self { callback, source: source.into(), bytes, finished_bytes: Cell::new(0), file_bytes: Rc::default() }
    }

    /// Reports how many bytes are read.
    ///
    /// # Errors
    /// [`Error::Interrupted`] where the callback ends the reading.
    pub(super) fn report(&self) -> Result<()> {
        match (self.callback)(self.finished_bytes.get() + self.file_bytes.get(), self.bytes) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Interrupted { path: self.source.clone() }),
        }
    }

    /// The counter for the bytes of the file that is read next.
    pub(super) fn file_counter(&self) -> Rc<Cell<u64>> {
        self.file_bytes.set(0);
        self.file_bytes.clone()
    }

    /// Counts a file of `bytes` bytes as read to its end: readers may skip bytes, and the Parquet reader counts none.
    pub(super) fn finish_file(&self, bytes: u64) {
        self.file_bytes.set(0);
        self.finished_bytes.set(self.finished_bytes.get() + bytes);
    }
}

/// A reader that counts the bytes that are read.
pub(super) struct ByteCounter<R> {
    pub(super) from: R,
    pub(super) count: Rc<Cell<u64>>,
}

impl<R: Read> Read for ByteCounter<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let read = self.from.read(into)?;
        self.count.set(self.count.get() + read as u64);
        Ok(read)
    }
}
