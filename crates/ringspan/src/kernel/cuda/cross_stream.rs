//! Sharing of elements on a GPU: which streams may read what another has written, and from when on.
//!
//! An event marks the point that the writer's stream must have reached; the reader's stream waits for it, and no CPU waits.

use super::super::{DType, DeviceArray};
use super::failed;
use super::memory::{GpuElement, Memory};
use crate::error::{Error, Result};
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtrMut, DriverError, result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The stream that writes some memory, and the streams that read it.
pub(super) struct CrossStreamAccess {
    /// The stream that writes the memory.
    stream: Arc<CudaStream>,
    state: Mutex<StreamReaders>,
}

#[derive(Default)]
struct StreamReaders {
    /// Event after the last write that others may read.
    ready: Option<CudaEvent>,
    /// Streams other than the writer's that read the memory.
    readers: Vec<Arc<CudaStream>>,
}

impl CrossStreamAccess {
    /// Makes the state of memory that `stream` writes.
    pub(super) fn new(stream: Arc<CudaStream>) -> Self {
        Self { stream, state: Mutex::default() }
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    fn state(&self) -> MutexGuard<'_, StreamReaders> {
        // A panic leaves the list and the event valid.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks all writes so far as readable by others.
    pub(super) fn share(&self) -> std::result::Result<(), DriverError> {
        self.state().ready = Some(self.stream.record_event(None)?);
        Ok(())
    }

    /// Lets `reader` read what was shared (or, if nothing was, all writes so far), until the memory is freed.
    pub(super) fn order(&self, reader: &Arc<CudaStream>) -> std::result::Result<(), DriverError> {
        self.follow(reader)?;
        self.remember(reader);
        Ok(())
    }

    /// Like [`order`](Self::order), for a reader that keeps the memory alive until it has read it.
    fn follow(&self, reader: &Arc<CudaStream>) -> std::result::Result<(), DriverError> {
        if *reader == self.stream {
            return Ok(());
        }
        match &self.state().ready {
            Some(ready) => reader.wait(ready),
            None => reader.wait(&self.stream.record_event(None)?),
        }
    }

    /// Records that freeing the memory must wait for this stream.
    fn remember(&self, reader: &Arc<CudaStream>) {
        let mut state = self.state();
        if *reader != self.stream && !state.readers.contains(reader) {
            state.readers.push(reader.clone());
        }
    }

    /// Removes and returns the streams other than the writer's that have read the memory.
    pub(super) fn take_readers(&self) -> Vec<Arc<CudaStream>> {
        std::mem::take(&mut self.state().readers)
    }

    /// Makes the writer's stream wait for all readers, so that later work on it may write to the memory or free it.
    pub(super) fn give_back(&self) {
        let context = self.stream.context();
        context.record_err(context.bind_to_thread());
        self.take_readers().iter().for_each(|reader| wait_for(context, &self.stream, reader));
    }
}

/// Makes one stream wait for all work started on another. It is called when memory is freed, where errors cannot be
/// returned: `context` records them.
pub(super) fn wait_for(context: &CudaContext, waiting: &CudaStream, stream: &CudaStream) {
    context.record_err(stream.record_event(None).and_then(|event| waiting.wait(&event)));
}

/// Elements on a GPU that others may read, of a [`DeviceArray`] or [handed over](super::SharedSlice).
#[derive(Clone, Copy)]
pub struct GpuSource<'a> {
    pub(super) sharing: &'a CrossStreamAccess,
    pub(super) at: u64,
    pub(super) dtype: DType,
    pub(super) len: usize,
}

impl std::fmt::Debug for GpuSource<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?} on GPU {}", self.len, self.dtype, self.context().ordinal())
    }
}

impl<'a> GpuSource<'a> {
    /// The elements of an array; `None` if they are not on a GPU.
    pub fn of_array(array: &'a DeviceArray) -> Option<Self> {
        Memory::source(array.data())
    }

    /// Copies f32 elements for another library, on its stream, after the work that writes them.
    ///
    /// # Errors
    /// Elements of another type, or failures of the driver.
    pub fn copied_on(&self, stream: &Arc<CudaStream>) -> Result<CudaSlice<f32>> {
        // SAFETY: the copy writes all elements, or fails, and then the memory is not returned.
        let taken = unsafe { stream.alloc(self.len) };
        let mut to = taken.map_err(failed(&format!("GPU {}", stream.context().ordinal()), "take memory"))?;
        self.copy_to(&mut to)?;
        Ok(to)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the elements have this type.
    pub fn is_of<T: GpuElement>(&self) -> bool {
        self.dtype == T::data(&[]).dtype()
    }

    /// Copies all elements into memory of another library, on its stream, after the work that writes them; also from
    /// another GPU.
    ///
    /// # Errors
    /// A target with another type or number of elements, or failures of the driver.
    pub fn copy_to<T: GpuElement>(&self, to: &mut impl DevicePtrMut<T>) -> Result<()> {
        let (context, dtype) = (to.stream().context().clone(), T::data(&[]).dtype());
        if self.dtype != dtype || to.len() != self.len {
            let kind = format!("{dtype:?}").to_lowercase();
            return Err(Error::Device {
                device: format!("GPU {}", self.context().ordinal()),
                operation: "copy",
                message: format!("{self:?} to {} {kind} elements on GPU {}", to.len(), context.ordinal()),
            });
        }
        if self.is_empty() {
            return Ok(());
        }
        let failed = |operation| failed(&format!("GPU {}", context.ordinal()), operation);
        let stream = to.stream().clone();
        context.bind_to_thread().map_err(failed("use from this thread"))?;
        let from = self.read(&stream)?;
        let (at, written) = to.device_ptr_mut(&stream);
        let bytes = self.len * self.dtype.width();
        // SAFETY: both have the same number of bytes, each in the context given for it, and the stream waits for the
        // writer.
        let copied = unsafe {
            match self.is_in(&context) {
                true => result::memcpy_dtod_async(at, from, bytes, stream.cu_stream()),
                false => {
                    let (to, of) = (context.cu_ctx(), self.context().cu_ctx());
                    result::memcpy_peer_async(to, at, of, from, bytes, stream.cu_stream())
                }
            }
        };
        drop(written);
        copied.map_err(failed("copy on the GPU"))
    }

    fn context(&self) -> &Arc<CudaContext> {
        self.sharing.stream.context()
    }

    /// Whether the elements are on the GPU of `context`.
    pub(super) fn is_in(&self, context: &CudaContext) -> bool {
        self.context().cu_ctx() == context.cu_ctx()
    }

    /// The address of the elements, for reads on `stream`, which is made to wait until they are written.
    pub(super) fn read(&self, stream: &Arc<CudaStream>) -> Result<u64> {
        self.sharing.order(stream).map_err(self.failed())?;
        Ok(self.at)
    }

    /// Like [`read`](Self::read), for a flight. The caller keeps the elements until the flight has ended, so that no other
    /// stream waits for flights, which wait for other ranks; or it reports that the flight was
    /// [aborted](Self::was_aborted).
    #[cfg(feature = "nccl")]
    pub(super) fn read_in_flight(&self, stream: &Arc<CudaStream>) -> Result<u64> {
        self.sharing.follow(stream).map_err(self.failed())?;
        Ok(self.at)
    }

    /// Reports an aborted flight on this stream: it no longer waits for other ranks, but may still be running.
    #[cfg(feature = "nccl")]
    pub(super) fn was_aborted(&self, stream: &Arc<CudaStream>) {
        self.sharing.remember(stream);
    }

    fn failed(&self) -> impl Fn(DriverError) -> Error + use<> {
        failed(&format!("GPU {}", self.context().ordinal()), "wait for another rank's stream")
    }
}
