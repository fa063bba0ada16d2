//! How far the text of a source has become tokens, and whether it shall become more.

use crate::error::{Error, Result};
use std::{
    cell::Cell,
    io::Read,
    ops::ControlFlow,
    path::{Path, PathBuf},
    rc::Rc,
};

/// Told how many bytes of the files of a source were read, and how many they have; it may end the reading.
pub type Watch<'a> = &'a (dyn Fn(u64, u64) -> ControlFlow<()> + Sync);

/// For who reads to the end without being watched.
pub fn unwatched(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// The reading of a source, as one is told who watches it.
pub(super) struct Progress<'a> {
    watch: Watch<'a>,
    source: PathBuf,
    /// Bytes of all files, as they are stored.
    bytes: u64,
    /// Those of files that were read to the end.
    before: Cell<u64>,
    /// Those of the file that is being read.
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

    /// A file of so many bytes was read to the end, however many of them were counted.
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
