//! Memory of a GPU: which rank owns it, and when others may read it.
//!
//! A rank writes on its own stream. When it sends an array, an event marks the point that its stream must have reached, and
//! the streams of readers wait for it (`sharing.rs`). Memory that no other rank has read is freed on its own stream, other
//! memory on a stream that waits for all readers, so that no rank's work waits for them. (cudarc can order streams too, but
//! remembers only one reader of a buffer, and a block of keys has several.)

use super::super::Data;
use super::super::view::Stored;
use super::cross_stream::{CrossStreamAccess, GpuSource, wait_for};
use super::{Cuda, Gpu};
use crate::comm::OnDevice;
use crate::error::{Error, Result};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use std::ops::Range;
use std::sync::Arc;

/// Memory that was allocated by the driver, or is borrowed.
pub(super) struct Memory {
    pub(super) gpu: Gpu,
    at: u64,
    /// The allocation; `None` if the memory is borrowed.
    taken: Option<CudaSlice<u8>>,
    /// The stream on which it is written, and the streams that read it.
    sharing: CrossStreamAccess,
}

impl Drop for Memory {
    fn drop(&mut self) {
        // The lender may write to it or free it, after all readers.
        let Some(taken) = self.taken.take() else { return self.sharing.give_back() };
        let (context, readers) = (&self.gpu.0.context, self.sharing.take_readers());
        context.record_err(context.bind_to_thread());
        if readers.is_empty() {
            return drop(taken);
        }
        let aside = &self.gpu.0.aside;
        readers.iter().chain([self.sharing.stream()]).for_each(|stream| wait_for(context, aside, stream));
        let bytes = taken.len();
        // SAFETY: the pointer that one slice gives up is taken by the other, which frees it on its stream.
        drop(unsafe { aside.upgrade_device_ptr::<u8>(taken.leak(), bytes) });
    }
}

/// Numbers in the memory of a GPU: f32, bf16 or f16. A clone shares the memory.
#[derive(Clone)]
pub struct GpuArray {
    memory: Arc<Memory>,
    stored: Stored,
    start: usize,
    len: usize,
}

/// A range of a [`GpuArray`], as part of [`Data`].
#[derive(Clone, Copy)]
pub struct GpuData<'a> {
    memory: &'a Memory,
    stored: Stored,
    start: usize,
    len: usize,
}

/// A range of a [`GpuArray`] for writing, which nothing else accesses.
pub struct GpuMut<'a>(GpuData<'a>);

impl std::fmt::Debug for GpuArray {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.data().fmt(f)
    }
}

impl std::fmt::Debug for GpuData<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?} on {:?}", self.len, self.stored, self.memory.gpu)
    }
}

impl std::fmt::Debug for GpuMut<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl OnDevice for GpuArray {
    fn elements(&self) -> usize {
        self.len
    }

    fn width(&self) -> u64 {
        self.stored.width() as u64
    }
}

impl GpuArray {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Borrows the elements, for views.
    pub fn data(&self) -> GpuData<'_> {
        GpuData { memory: &self.memory, stored: self.stored, start: self.start, len: self.len }
    }

    /// Borrows the elements as the source of a copy.
    pub fn source(&self) -> GpuSource<'_> {
        let GpuData { memory, stored, len, .. } = self.data();
        GpuSource { sharing: &memory.sharing, at: self.data().at(), stored, len }
    }

    /// Copies all elements into memory of another library, as by [`GpuSource::copy_to`].
    ///
    /// # Errors
    /// A target with another type or number of elements, or failures of the driver.
    pub fn copy_to<T: GpuElement>(&self, to: &mut impl DevicePtrMut<T>) -> Result<()> {
        self.source().copy_to(to)
    }

    /// Copies f32 elements for another library, on its stream, after the work that this array's rank has started.
    ///
    /// # Errors
    /// Elements of another type, or failures of the driver.
    pub fn copied_on(&self, stream: &Arc<CudaStream>) -> Result<CudaSlice<f32>> {
        // SAFETY: the copy writes all elements, or fails, and then the memory is not returned.
        let taken = unsafe { stream.alloc(self.len) };
        let mut to = taken.map_err(self.memory.gpu.failed("take memory"))?;
        self.copy_to(&mut to)?;
        Ok(to)
    }

    /// A range of the elements as another array that shares the memory.
    pub(in crate::kernel) fn part(&self, range: Range<usize>) -> Self {
        let GpuData { start, len, .. } = self.data().slice(range);
        Self { start, len, ..self.clone() }
    }

    pub(in crate::kernel) fn all_mut(&mut self) -> GpuMut<'_> {
        GpuMut(self.data())
    }

    pub(in crate::kernel) fn split_at_mut(&mut self, at: usize) -> (GpuMut<'_>, GpuMut<'_>) {
        let all = self.data();
        (GpuMut(all.slice(0..at)), GpuMut(all.slice(at..all.len)))
    }

    pub(in crate::kernel) fn is_on(&self, gpu: &Gpu) -> bool {
        self.memory.gpu.is(gpu)
    }

    /// Lets other ranks read the elements written so far; after this they must not be written to any more.
    pub(in crate::kernel) fn share(&self, cuda: &Cuda) -> Result<()> {
        // If another rank sent the array, that rank has already called this.
        if cuda.stream != *self.memory.sharing.stream() {
            return Ok(());
        }
        self.memory.sharing.share().map_err(cuda.gpu.failed("mark what is sent"))
    }
}

impl<'a> GpuData<'a> {
    /// Number of elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The elements in a range.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn slice(self, range: Range<usize>) -> GpuData<'a> {
        assert!(range.start <= range.end && range.end <= self.len, "elements {range:?} of {}", self.len);
        GpuData { start: self.start + range.start, len: range.len(), ..self }
    }

    pub(in crate::kernel) fn stored(self) -> Stored {
        self.stored
    }

    pub(in crate::kernel) fn gpu(self) -> &'a Gpu {
        &self.memory.gpu
    }

    fn at(self) -> u64 {
        self.memory.at + (self.start * self.stored.width()) as u64
    }

    /// The address of the elements, for reads on `stream`, which is made to wait until they are written.
    pub(super) fn read(self, stream: &Arc<CudaStream>) -> Result<u64> {
        self.memory.sharing.order(stream).map_err(self.memory.gpu.failed("wait for another rank's stream"))?;
        Ok(self.at())
    }
}

impl GpuMut<'_> {
    pub(in crate::kernel) fn len(&self) -> usize {
        self.0.len
    }

    pub(in crate::kernel) fn data(&self) -> GpuData<'_> {
        self.0
    }

    /// The address of the elements, for writes, which only the owner's stream may do.
    pub(super) fn write(&mut self, stream: &Arc<CudaStream>) -> Result<u64> {
        if stream != self.0.memory.sharing.stream() {
            return Err(Error::Device {
                device: format!("{:?}", self.0.memory.gpu),
                operation: "write",
                message: format!("{} elements that belong to another rank", self.0.len),
            });
        }
        Ok(self.0.at())
    }
}

/// An element type that kernels read: f32, bf16 or f16.
pub trait GpuElement: sealed::Sealed {}

mod sealed {
    use crate::kernel::Data;

    pub trait Sealed: Sized {
        /// Such elements as `Data` of the CPU.
        fn data(elements: &[Self]) -> Data<'_>;
    }
}

macro_rules! element {
    ($element:ty, $data:ident) => {
        impl GpuElement for $element {}

        impl sealed::Sealed for $element {
            fn data(elements: &[Self]) -> Data<'_> {
                Data::$data(elements)
            }
        }
    };
}

element!(f32, F32);
element!(half::bf16, Bf16);
element!(half::f16, F16);

/// Numbers of another library on a GPU, borrowed for a call.
///
/// This rank's reads wait for work that was started before on the slice's stream, and work that is started there after the
/// loan waits for this rank. These waits are on the GPU, not on the CPU.
#[derive(Debug)]
pub struct BorrowedSlice<'a> {
    array: GpuArray,
    _lender: std::marker::PhantomData<&'a ()>,
}

impl BorrowedSlice<'_> {
    /// Borrows the elements, for views.
    pub fn data(&self) -> GpuData<'_> {
        self.array.data()
    }
}

impl Cuda {
    /// An array with uninitialised elements.
    pub(in crate::kernel) fn array(&self, stored: Stored, len: usize) -> Result<GpuArray> {
        let bytes = (len * stored.width()).max(1);
        // SAFETY: every caller writes the array before it is read.
        let taken = unsafe { self.stream.alloc::<u8>(bytes) }.map_err(self.gpu.failed("take memory"))?;
        Ok(self.own(taken, stored, len))
    }

    /// Makes an array of memory that was allocated on this rank's stream.
    pub(super) fn own(&self, taken: CudaSlice<u8>, stored: Stored, len: usize) -> GpuArray {
        let (gpu, sharing, at) = (self.gpu.clone(), CrossStreamAccess::new(self.stream.clone()), self.at(&taken));
        let memory = Memory { gpu, at, taken: Some(taken), sharing };
        GpuArray { memory: Arc::new(memory), stored, start: 0, len }
    }

    /// Borrows `slice`, which must be on this GPU.
    pub(in crate::kernel) fn borrow<'a, T: GpuElement>(&self, slice: &'a CudaSlice<T>) -> Result<BorrowedSlice<'a>> {
        if slice.context().cu_ctx() != self.gpu.0.context.cu_ctx() {
            return Err(Error::Device {
                device: format!("{:?}", self.gpu),
                operation: "borrow",
                message: format!("{} elements that lie on GPU {}", slice.len(), slice.ordinal()),
            });
        }
        let stream = slice.stream().clone();
        let (at, read) = slice.device_ptr(&stream);
        drop(read);
        let sharing = CrossStreamAccess::new(stream.clone());
        let memory = Memory { gpu: self.gpu.clone(), at, taken: None, sharing };
        let array = GpuArray { memory: Arc::new(memory), stored: T::data(&[]).stored(), start: 0, len: slice.len() };
        array.memory.sharing.share().map_err(self.gpu.failed("mark what is lent"))?;
        Ok(BorrowedSlice { array, _lender: std::marker::PhantomData })
    }
}
