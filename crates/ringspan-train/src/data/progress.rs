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
pub type Watch<'a> = &'a (dyn Fn(u64, u64) -> ControlFlow<()> + Sync);

/// A [`Watch`] that lets every source be read to its end.
pub fn unwatched(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Counts the bytes that are read of a source, and reports them to its [`Watch`].
pub(super) struct Progress<'a> {
    watch: Watch<'a>,
    source: PathBuf,
    /// Bytes of all files, as they are stored.
    bytes: u64,
    /// Bytes of the files that were read to the end.
    before: Cell<u64>,
    /// Bytes that were read of the open file.
    here: Rc<Cell<u64>>,
}

impl<'a> Progress<'a> {
    pub(super) fn new(watch: Watch<'a>, source: &Path, bytes: u64) -> Self {
        Self { watch, source: source.into(), bytes, before: Cell::new(0), here: Rc::default() }
    }

    /// Reports how many bytes are read.
    ///
    /// # Errors
    /// [`Error::Interrupted`] where the watch ends the reading.
    pub(super) fn tell(&self) -> Result<()> {
        match (self.watch)(self.before.get() + self.here.get(), self.bytes) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Interrupted { path: self.source.clone() }),
        }
    }

    /// The counter for the bytes of the file that is read next.
    pub(super) fn count(&self) -> Rc<Cell<u64>> {
        self.here.set(0);
        self.here.clone()
    }

    /// Counts a file of `bytes` bytes as read to its end: readers may skip bytes, and the Parquet reader counts none.
    pub(super) fn end_of_file(&self, bytes: u64) {
        self.here.set(0);
        self.before.set(self.before.get() + bytes);
    }
}

/// A reader that counts the bytes that are read.
pub(super) struct Counted<R> {
    pub(super) from: R,
    pub(super) count: Rc<Cell<u64>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let read = self.from.read(into)?;
        self.count.set(self.count.get() + read as u64);
        Ok(read)
    }
}
