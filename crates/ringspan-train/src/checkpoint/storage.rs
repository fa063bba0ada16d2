//! The storage to which checkpoints are written: the disk, or in tests one that fills up.

use std::{fs::File, io, path::Path};

/// Creates files. It is a trait so that a full disk can be tested.
pub trait Storage: Send + Sync {
    /// Creates an empty file.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink>>;
}

/// A file that is being written.
pub trait Sink: io::Write {
    /// Returns once everything written is on the disk.
    ///
    /// # Errors
    /// Errors of the operating system; some systems report a full disk only here.
    fn sync(&mut self) -> io::Result<()>;
}

impl Sink for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// The file system.
#[derive(Debug, Clone, Copy, Default)]
pub struct Disk;

impl Storage for Disk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink>> {
        Ok(Box::new(File::create(path)?))
    }
}
