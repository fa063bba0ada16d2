//! How far the text of a source has become tokens, and whether it shall become more.

use crate::error::{Error, Result};
use std::{
    cell::Cell,
    io::Read,
    ops::ControlFlow,
    path::{Path, PathBuf},
    rc::Rc,
};

/// A function that is told how many bytes of a source's files were read, and how many they have, and that may end the reading.
pub type Watch<'a> = &'a (dyn Fn(u64, u64) -> ControlFlow<()> + Sync);

/// A [`Watch`] that lets every source be read to its end.
pub fn unwatched(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Counts what is read of a source, and tells its [`Watch`].
pub(super) struct Progress<'a> {
    watch: Watch<'a>,
    source: PathBuf,
    /// How many bytes all files have, as they are stored.
    bytes: u64,
    /// How many bytes the files have that were read to the end.
    before: Cell<u64>,
    /// How many bytes were read of the file that is open.
    here: Rc<Cell<u64>>,
}

impl<'a> Progress<'a> {
    pub(super) fn new(watch: Watch<'a>, source: &Path, bytes: u64) -> Self {
        Self { watch, source: source.into(), bytes, before: Cell::new(0), here: Rc::default() }
    }

    /// Says how far the reading has come.
    ///
    /// # Errors
    /// [`Error::Interrupted`] where it shall end.
    pub(super) fn tell(&self) -> Result<()> {
        match (self.watch)(self.before.get() + self.here.get(), self.bytes) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Interrupted { path: self.source.clone() }),
        }
    }

    /// Where the bytes of the file that is read next are counted.
    pub(super) fn count(&self) -> Rc<Cell<u64>> {
        self.here.set(0);
        self.here.clone()
    }

    /// Counts a file of so many bytes as read to its end: readers may leave out bytes, and Parquet's counts none.
    pub(super) fn end_of_file(&self, bytes: u64) {
        self.here.set(0);
        self.before.set(self.before.get() + bytes);
    }
}

/// Counts what is read.
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
