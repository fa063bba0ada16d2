//! Memory of a GPU: whose it is, and when others may read it.
//!
//! A rank writes on its own stream. When it sends an array, an event marks how far that stream has to be; the stream of a
//! reader waits for the event, so no CPU waits. What nobody else has read goes back on its own stream, anything else on one
//! that waits for all of its readers, so that no rank's work waits for them. (cudarc can order streams too, but remembers one
//! reader of a buffer, and a block of keys has several.)

use super::super::Data;
use super::super::view::Stored;
use super::{Cuda, Gpu};
use crate::comm::OnDevice;
use crate::error::{Error, Result};
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError, result};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What was taken from the driver, or lent by somebody else.
pub(super) struct Memory {
    pub(super) gpu: Gpu,
    /// On which it is written.
    stream: Arc<CudaStream>,
    at: u64,
    /// None if it is lent.
    taken: Option<CudaSlice<u8>>,
    sharing: Mutex<Sharing>,
}

#[derive(Default)]
struct Sharing {
    /// Behind the last write that others may read.
    ready: Option<CudaEvent>,
    /// Streams that read it, besides its own.
    readers: Vec<Arc<CudaStream>>,
}

impl Memory {
    fn sharing(&self) -> MutexGuard<'_, Sharing> {
        // A list and an event: nothing is half done by a panic.
        self.sharing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks what was written so far as what others read.
    fn share(&self) -> std::result::Result<(), DriverError> {
        self.sharing().ready = Some(self.stream.record_event(None)?);
        Ok(())
    }

    /// From now on `reader` may read what was shared.
    fn order(&self, reader: &Arc<CudaStream>) -> std::result::Result<(), DriverError> {
        if *reader == self.stream {
            return Ok(());
        }
        let mut sharing = self.sharing();
        match &sharing.ready {
            Some(ready) => reader.wait(ready)?,
            None => reader.wait(&self.stream.record_event(None)?)?,
        }
        if !sharing.readers.contains(reader) {
            sharing.readers.push(reader.clone());
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let readers = std::mem::take(&mut self.sharing().readers);
        let context = &self.gpu.0.context;
        let wait_for = |waiting: &CudaStream, stream: &CudaStream| {
            context.record_err(stream.record_event(None).and_then(|event| waiting.wait(&event)));
        };
        context.record_err(context.bind_to_thread());
        match self.taken.take() {
            // Whoever lent it may write to it, or give it back, behind this on its stream.
            None => readers.iter().for_each(|reader| wait_for(&self.stream, reader)),
            Some(taken) if readers.is_empty() => drop(taken),
            Some(taken) => {
                let aside = &self.gpu.0.aside;
                readers.iter().chain([&self.stream]).for_each(|stream| wait_for(aside, stream));
                let bytes = taken.len();
                // SAFETY: what one slice gives up the other takes, and gives back on its stream.
                drop(unsafe { aside.upgrade_device_ptr::<u8>(taken.leak(), bytes) });
            }
        }
    }
}

/// Numbers in the memory of a GPU: f32, bf16 or f16. A clone is the same numbers, not a copy.
#[derive(Clone)]
pub struct GpuArray {
    memory: Arc<Memory>,
    stored: Stored,
    start: usize,
    len: usize,
}

/// Some numbers of a [`GpuArray`], as [`Data`] has them.
#[derive(Clone, Copy)]
pub struct GpuData<'a> {
    memory: &'a Memory,
    stored: Stored,
    start: usize,
    len: usize,
}

/// Numbers of a [`GpuArray`] that nobody else reads or writes.
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
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements, for views.
    pub fn data(&self) -> GpuData<'_> {
        GpuData { memory: &self.memory, stored: self.stored, start: self.start, len: self.len }
    }

    /// Copies f32 elements into a slice of another library, on its stream, behind what this array's rank has started.
    ///
    /// # Errors
    /// A slice of another length or GPU; failures of the driver.
    pub fn copy_to(&self, to: &mut CudaSlice<f32>) -> Result<()> {
        let gpu = &self.memory.gpu;
        let same = to.context().cu_ctx() == gpu.0.context.cu_ctx();
        if !same || self.stored != Stored::F32 || to.len() != self.len {
            return Err(Error::Device {
                device: format!("{gpu:?}"),
                operation: "copy",
                message: format!("{self:?} to {} f32 elements on GPU {}", to.len(), to.ordinal()),
            });
        }
        let stream = to.stream().clone();
        stream.context().bind_to_thread().map_err(gpu.failed("use from this thread"))?;
        let from = self.data().read(&stream)?;
        let (at, written) = to.device_ptr_mut(&stream);
        // SAFETY: both have as many bytes, and the stream waits for who wrote these.
        let copied = unsafe { result::memcpy_dtod_async(at, from, 4 * self.len, stream.cu_stream()) };
        drop(written);
        copied.map_err(gpu.failed("copy on the GPU"))
    }

    /// A copy of f32 elements for another library, made on its stream behind what this array's rank has started.
    ///
    /// # Errors
    /// Elements of another type, a stream of another GPU; failures of the driver.
    pub fn copied_on(&self, stream: &Arc<CudaStream>) -> Result<CudaSlice<f32>> {
        // SAFETY: the copy writes all elements, or fails and nobody gets them.
        let taken = unsafe { stream.alloc(self.len) };
        let mut to = taken.map_err(self.memory.gpu.failed("take memory"))?;
        self.copy_to(&mut to)?;
        Ok(to)
    }

    /// Some of the elements; the memory stays as long as either is there.
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

    /// Lets other ranks read what was written so far; nothing may be written to it any more.
    pub(in crate::kernel) fn share(&self, cuda: &Cuda) -> Result<()> {
        // Of what another rank sent, that rank has said when it is ready.
        if *cuda.stream != *self.memory.stream {
            return Ok(());
        }
        self.memory.share().map_err(cuda.gpu.failed("mark what is sent"))
    }
}

impl<'a> GpuData<'a> {
    /// Elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Some of the elements.
    ///
    /// # Panics
    /// If they are not all there.
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

    /// Where the elements lie, for a stream that from now on reads them.
    pub(super) fn read(self, stream: &Arc<CudaStream>) -> Result<u64> {
        self.memory.order(stream).map_err(self.memory.gpu.failed("wait for another rank's stream"))?;
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

    /// Where the elements lie, for their own stream to write them.
    pub(super) fn write(&mut self, stream: &Arc<CudaStream>) -> Result<u64> {
        if *stream != self.0.memory.stream {
            return Err(Error::Device {
                device: format!("{:?}", self.0.memory.gpu),
                operation: "write",
                message: format!("{} elements that belong to another rank", self.0.len),
            });
        }
        Ok(self.0.at())
    }
}

/// An element that kernels read: f32, bf16 or f16.
pub trait GpuElement: sealed::Sealed {}

mod sealed {
    use crate::kernel::Data;

    pub trait Sealed: Sized {
        /// How the CPU knows such elements.
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

/// Numbers that another library holds on a GPU, borrowed for a call.
///
/// What was started on the slice's stream before is waited for, and what is started there after the loan has ended waits for
/// this rank: on the GPU, not on the CPU.
#[derive(Debug)]
pub struct Lent<'a> {
    array: GpuArray,
    _lender: std::marker::PhantomData<&'a ()>,
}

impl Lent<'_> {
    /// The elements, for views.
    pub fn data(&self) -> GpuData<'_> {
        self.array.data()
    }
}

impl Cuda {
    /// Elements that nobody has written.
    pub(in crate::kernel) fn array(&self, stored: Stored, len: usize) -> Result<GpuArray> {
        let bytes = (len * stored.width()).max(1);
        // SAFETY: whoever asks for an array writes it before it is read.
        let taken = unsafe { self.stream.alloc::<u8>(bytes) }.map_err(self.gpu.failed("take memory"))?;
        Ok(self.own(taken, stored, len))
    }

    /// An array of what was taken on this rank's stream.
    pub(super) fn own(&self, taken: CudaSlice<u8>, stored: Stored, len: usize) -> GpuArray {
        let (gpu, stream, at) = (self.gpu.clone(), self.stream.clone(), self.at(&taken));
        let memory = Memory { gpu, stream, at, taken: Some(taken), sharing: Mutex::default() };
        GpuArray { memory: Arc::new(memory), stored, start: 0, len }
    }

    /// A loan of `slice`, of this GPU.
    pub(in crate::kernel) fn borrow<'a, T: GpuElement>(&self, slice: &'a CudaSlice<T>) -> Result<Lent<'a>> {
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
        let memory =
            Memory { gpu: self.gpu.clone(), stream: stream.clone(), at, taken: None, sharing: Mutex::default() };
        let array = GpuArray { memory: Arc::new(memory), stored: T::data(&[]).stored(), start: 0, len: slice.len() };
        array.memory.share().map_err(self.gpu.failed("mark what is lent"))?;
        Ok(Lent { array, _lender: std::marker::PhantomData })
    }
}
