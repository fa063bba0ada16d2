//! Who reads what a stream has written, and from when on: elements on a GPU, whoever holds them.
//!
//! An event marks how far the stream of the writer has to be; the stream of a reader waits for the event, so no CPU waits.

use super::super::view::Stored;
use super::failed;
use super::memory::GpuElement;
use crate::error::{Error, Result};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DevicePtrMut, DriverError, result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The writer of some memory, and its readers.
pub(super) struct Sharing {
    /// On which it is written.
    stream: Arc<CudaStream>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Behind the last write that others may read.
    ready: Option<CudaEvent>,
    /// Streams that read it, besides its own.
    readers: Vec<Arc<CudaStream>>,
}

impl Sharing {
    /// Of memory that `stream` writes.
    pub(super) fn new(stream: Arc<CudaStream>) -> Self {
        Self { stream, state: Mutex::default() }
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A list and an event: nothing is half done by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks what was written so far as what others read.
    pub(super) fn share(&self) -> std::result::Result<(), DriverError> {
        self.state().ready = Some(self.stream.record_event(None)?);
        Ok(())
    }

    /// From now on `reader` may read what was shared; all that was written so far, if nothing was. Until the memory goes back.
    pub(super) fn order(&self, reader: &Arc<CudaStream>) -> std::result::Result<(), DriverError> {
        self.follow(reader)?;
        self.remember(reader);
        Ok(())
    }

    /// The same for a reader that keeps the memory until it has read it.
    fn follow(&self, reader: &Arc<CudaStream>) -> std::result::Result<(), DriverError> {
        if *reader == self.stream {
            return Ok(());
        }
        match &self.state().ready {
            Some(ready) => reader.wait(ready),
            None => reader.wait(&self.stream.record_event(None)?),
        }
    }

    /// Whoever gives the memory back waits for this stream.
    fn remember(&self, reader: &Arc<CudaStream>) {
        let mut state = self.state();
        if *reader != self.stream && !state.readers.contains(reader) {
            state.readers.push(reader.clone());
        }
    }

    /// Streams that have read it, besides its own; from now on none has.
    pub(super) fn take_readers(&self) -> Vec<Arc<CudaStream>> {
        std::mem::take(&mut self.state().readers)
    }

    /// Whoever holds the memory may write to it, or give it back, behind this on its stream: it waits for all readers.
    pub(super) fn give_back(&self) {
        let context = self.stream.context();
        context.record_err(context.bind_to_thread());
        self.take_readers().iter().for_each(|reader| wait_for(context, &self.stream, reader));
    }
}

/// Makes one stream wait for all that was started on another. Called where memory goes back, and nobody hears of errors:
/// `context` remembers them.
pub(super) fn wait_for(context: &CudaContext, waiting: &CudaStream, stream: &CudaStream) {
    context.record_err(stream.record_event(None).and_then(|event| waiting.wait(&event)));
}

/// Elements on a GPU that others may read: those of a [`GpuArray`](super::GpuArray), or what was [handed over](super::Handed).
#[derive(Clone, Copy)]
pub struct GpuSource<'a> {
    pub(super) sharing: &'a Sharing,
    pub(super) at: u64,
    pub(super) stored: Stored,
    pub(super) len: usize,
}

impl std::fmt::Debug for GpuSource<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?} on GPU {}", self.len, self.stored, self.context().ordinal())
    }
}

impl GpuSource<'_> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether they are of this type.
    pub fn is_of<T: GpuElement>(&self) -> bool {
        self.stored == T::data(&[]).stored()
    }

    /// Copies all elements into as many of another library, on the stream of these, behind what has written them; from another
    /// GPU, too.
    ///
    /// # Errors
    /// Memory for elements of another type or number; failures of the driver.
    pub fn copy_to<T: GpuElement>(&self, to: &mut impl DevicePtrMut<T>) -> Result<()> {
        let (context, stored) = (to.stream().context().clone(), T::data(&[]).stored());
        if self.stored != stored || to.len() != self.len {
            let kind = format!("{stored:?}").to_lowercase();
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
        let bytes = self.len * self.stored.width();
        // SAFETY: both have as many bytes, each in the context it is named with, and the stream waits for who wrote these.
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

    /// Whether they lie on that GPU.
    pub(super) fn is_in(&self, context: &CudaContext) -> bool {
        self.context().cu_ctx() == context.cu_ctx()
    }

    /// Where the elements lie, for a stream that from now on reads them.
    pub(super) fn read(&self, stream: &Arc<CudaStream>) -> Result<u64> {
        self.sharing.order(stream).map_err(self.failed())?;
        Ok(self.at)
    }

    /// The same for a flight. Whoever lets it go keeps the elements until it has ended: no stream of another may wait for
    /// flights, since these wait for other ranks; or says that it was [aborted](Self::was_aborted).
    #[cfg(feature = "nccl")]
    pub(super) fn read_in_flight(&self, stream: &Arc<CudaStream>) -> Result<u64> {
        self.sharing.follow(stream).map_err(self.failed())?;
        Ok(self.at)
    }

    /// What is left of a flight on this stream waits for nobody, but is not over.
    #[cfg(feature = "nccl")]
    pub(super) fn was_aborted(&self, stream: &Arc<CudaStream>) {
        self.sharing.remember(stream);
    }

    fn failed(&self) -> impl Fn(DriverError) -> Error + use<> {
        failed(&format!("GPU {}", self.context().ordinal()), "wait for another rank's stream")
    }
}
