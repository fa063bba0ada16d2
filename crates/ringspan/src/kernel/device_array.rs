//! Arrays in the memory of a device, which only the backend that made them can read.

use super::DType;
use crate::comm::OnDevice;
use crate::error::Result;
use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// Allocated memory of a device; dropping it frees the memory. A [`Backend`](super::Backend) recognises its own by a downcast
/// to the type that it made.
pub trait DeviceMemory: Any + Debug + Send + Sync {
    /// Copies the bytes from `start` on to the memory of the CPU, for a rank that computes on the CPU and received them.
    ///
    /// # Errors
    /// Failures of the device.
    fn download(&self, start: usize, to: &mut [u8]) -> Result<()>;
}

/// Elements of one type in the memory of a device. A clone shares the memory.
#[derive(Clone)]
pub struct DeviceArray {
    memory: Arc<dyn DeviceMemory>,
    dtype: DType,
    start: usize,
    len: usize,
}

/// A range of a [`DeviceArray`], borrowed for reading.
#[derive(Clone, Copy)]
pub struct DeviceSlice<'a> {
    memory: &'a (dyn DeviceMemory + 'static),
    dtype: DType,
    start: usize,
    len: usize,
}

/// A range of a [`DeviceArray`], borrowed for writing: nothing else accesses its elements.
pub struct DeviceSliceMut<'a>(DeviceSlice<'a>);

impl Debug for DeviceArray {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.data().fmt(f)
    }
}

impl Debug for DeviceSlice<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?} on {:?}", self.len, self.dtype, self.memory)
    }
}

impl Debug for DeviceSliceMut<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl OnDevice for DeviceArray {
    fn elements(&self) -> usize {
        self.len
    }

    fn width(&self) -> u64 {
        self.dtype.width() as u64
    }
}

impl DeviceArray {
    /// Makes an array of the first `len` elements in `memory`.
    pub fn new(memory: Arc<dyn DeviceMemory>, dtype: DType, len: usize) -> Self {
        Self { memory, dtype, start: 0, len }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The memory that the elements are in.
    pub fn memory(&self) -> &(dyn DeviceMemory + 'static) {
        &*self.memory
    }

    /// Borrows all elements for reading.
    pub fn data(&self) -> DeviceSlice<'_> {
        DeviceSlice { memory: &*self.memory, dtype: self.dtype, start: self.start, len: self.len }
    }

    /// Borrows all elements for writing.
    pub fn all_mut(&mut self) -> DeviceSliceMut<'_> {
        DeviceSliceMut(self.data())
    }

    /// Borrows the first `at` elements and the others for writing.
    ///
    /// # Panics
    /// If there are fewer elements.
    pub fn split_at_mut(&mut self, at: usize) -> (DeviceSliceMut<'_>, DeviceSliceMut<'_>) {
        let all = self.data();
        (DeviceSliceMut(all.slice(0..at)), DeviceSliceMut(all.slice(at..all.len)))
    }

    /// A range of the elements as another array that shares the memory.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn part(&self, range: Range<usize>) -> Self {
        let DeviceSlice { start, len, .. } = self.data().slice(range);
        Self { start, len, ..self.clone() }
    }
}

impl<'a> DeviceSlice<'a> {
    /// Number of elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The type of the elements.
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// The memory that the elements are in.
    pub fn memory(self) -> &'a (dyn DeviceMemory + 'static) {
        self.memory
    }

    /// Position of the first element in the memory, in bytes.
    pub fn start(self) -> usize {
        self.start * self.dtype.width()
    }

    /// The elements in a range.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn slice(self, range: Range<usize>) -> DeviceSlice<'a> {
        assert!(range.start <= range.end && range.end <= self.len, "elements {range:?} of {}", self.len);
        DeviceSlice { start: self.start + range.start, len: range.len(), ..self }
    }
}

impl DeviceSliceMut<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Borrows the elements for reading.
    pub fn data(&self) -> DeviceSlice<'_> {
        self.0
    }

    /// Borrows the elements again for writing, for a shorter time.
    pub fn reborrow(&mut self) -> DeviceSliceMut<'_> {
        DeviceSliceMut(self.0)
    }
}
