//! Sharing of elements on a GPU: which streams may read what another has written, and from when on.
//!
//! An event marks the point that the writer's stream must have reached; the reader's stream waits for it, and no CPU waits.

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The stream that writes some memory, and the streams that read it.
pub(crate) struct CrossStreamAccess {
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
    pub(crate) fn new(stream: Arc<CudaStream>) -> Self {
        Self { stream, state: Mutex::default() }
    }

    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    fn state(&self) -> MutexGuard<'_, StreamReaders> {
        // A panic leaves the list and the event valid.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks all writes so far as readable by others.
    pub(crate) fn share(&self) -> Result<(), DriverError> {
        self.state().ready = Some(self.stream.record_event(None)?);
        Ok(())
    }

    /// Lets `reader` read what was shared (or, if nothing was, all writes so far), until the memory is freed.
    pub(crate) fn order(&self, reader: &Arc<CudaStream>) -> Result<(), DriverError> {
        self.follow(reader)?;
        self.remember(reader);
        Ok(())
    }

    /// Like [`order`](Self::order), for a reader that keeps the memory alive until it has read it.
    pub(crate) fn follow(&self, reader: &Arc<CudaStream>) -> Result<(), DriverError> {
        if *reader == self.stream {
            return Ok(());
        }
        match &self.state().ready {
            Some(ready) => reader.wait(ready),
            None => reader.wait(&self.stream.record_event(None)?),
        }
    }

    /// Records that freeing the memory must wait for this stream.
    pub(crate) fn remember(&self, reader: &Arc<CudaStream>) {
        let mut state = self.state();
        if *reader != self.stream && !state.readers.contains(reader) {
            state.readers.push(reader.clone());
        }
    }

    /// Removes and returns the streams other than the writer's that have read the memory.
    pub(crate) fn take_readers(&self) -> Vec<Arc<CudaStream>> {
        std::mem::take(&mut self.state().readers)
    }

    /// Makes the writer's stream wait for all readers, so that later work on it may write to the memory or free it.
    pub(crate) fn give_back(&self) {
        let context = self.stream.context();
        context.record_err(context.bind_to_thread());
        self.take_readers().iter().for_each(|reader| wait_for(context, &self.stream, reader));
    }
}

/// Makes one stream wait for all work started on another. It is called when memory is freed, where errors cannot be
/// returned: `context` records them.
pub(crate) fn wait_for(context: &CudaContext, waiting: &CudaStream, stream: &CudaStream) {
    context.record_err(stream.record_event(None).and_then(|event| waiting.wait(&event)));
}
