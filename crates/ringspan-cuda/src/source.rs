//! Elements on a GPU as the source of a copy, for other libraries and for NCCL.

use crate::cross_stream::CrossStreamAccess;
use crate::error::failed;
use crate::memory::{GpuElement, Memory};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtrMut, DriverError, result};
use ringspan::kernel::{DType, DeviceArray, DeviceSlice};
use ringspan::{Error, Result};
use std::sync::Arc;

/// Elements on a GPU that others may read, of a [`DeviceArray`] or [handed over](crate::SharedSlice).
#[derive(Clone, Copy)]
pub struct GpuSource<'a> {
    pub(crate) sharing: &'a CrossStreamAccess,
    pub(crate) at: u64,
    pub(crate) dtype: DType,
    pub(crate) len: usize,
}

impl std::fmt::Debug for GpuSource<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?} on GPU {}", self.len, self.dtype, self.context().ordinal())
    }
}

impl<'a> GpuSource<'a> {
    /// The elements of an array; `None` if they are not on a GPU.
    pub fn of_array(array: &'a DeviceArray) -> Option<Self> {
        Self::of_slice(array.data())
    }

    fn of_slice(from: DeviceSlice<'a>) -> Option<Self> {
        let memory = Memory::of(from.memory())?;
        let at = memory.at + from.start() as u64;
        Some(Self { sharing: &memory.sharing, at, dtype: from.dtype(), len: from.len() })
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
        self.sharing.stream().context()
    }

    /// Whether the elements are on the GPU of `context`.
    pub(crate) fn is_in(&self, context: &CudaContext) -> bool {
        self.context().cu_ctx() == context.cu_ctx()
    }

    /// The address of the elements, for reads on `stream`, which is made to wait until they are written.
    pub(crate) fn read(&self, stream: &Arc<CudaStream>) -> Result<u64> {
        self.sharing.order(stream).map_err(self.failed())?;
        Ok(self.at)
    }

    /// Like [`read`](Self::read), for a flight. The caller keeps the elements until the flight has ended, so that no other
    /// stream waits for flights, which wait for other ranks; or it reports that the flight was
    /// [aborted](Self::was_aborted).
    #[cfg(feature = "nccl")]
    pub(crate) fn read_in_flight(&self, stream: &Arc<CudaStream>) -> Result<u64> {
        self.sharing.follow(stream).map_err(self.failed())?;
        Ok(self.at)
    }

    /// Reports an aborted flight on this stream: it no longer waits for other ranks, but may still be running.
    #[cfg(feature = "nccl")]
    pub(crate) fn was_aborted(&self, stream: &Arc<CudaStream>) {
        self.sharing.remember(stream);
    }

    fn failed(&self) -> impl Fn(DriverError) -> Error + use<> {
        failed(&format!("GPU {}", self.context().ordinal()), "wait for another rank's stream")
    }
}
