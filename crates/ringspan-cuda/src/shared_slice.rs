//! Messages whose elements another library holds on a GPU.

use crate::cross_stream::CrossStreamAccess;
use crate::memory::GpuElement;
use crate::source::GpuSource;
use cudarc::driver::{CudaSlice, DevicePtr};
use ringspan::comm::OnDevice;
use ringspan::kernel::DType;
use ringspan::{Error, Result};
use std::any::Any;
use std::ops::Range;

/// Elements of another library on a GPU that are sent to other ranks without a copy: they stay in place as long as any rank
/// has this. A communicator that [hands over](ringspan::comm::Communicator::passes_device_memory) passes it to ranks of this process,
/// with its owner; ranks of other processes receive a [`DeviceArray`](ringspan::kernel::DeviceArray) with the same elements.
pub struct SharedSlice {
    sharing: CrossStreamAccess,
    at: u64,
    dtype: DType,
    len: usize,
    /// The owner of the elements, dropped after the slice's stream was made to wait for all readers.
    owner: Box<dyn Any + Send + Sync>,
}

impl SharedSlice {
    /// Makes a message of a range of `slice`, which `owner` keeps alive. Readers wait for work that was started before on
    /// the slice's stream; freeing or writing the slice on that stream waits for all readers.
    ///
    /// # Safety
    /// As long as `owner` exists, the elements must stay in place and must not be written to.
    ///
    /// # Errors
    /// A range outside of the slice.
    pub unsafe fn new<T: GpuElement>(
        slice: &CudaSlice<T>,
        range: Range<usize>,
        owner: impl Any + Send + Sync,
    ) -> Result<Self> {
        let stream = slice.stream().clone();
        let (len, dtype) = (range.len(), T::data(&[]).dtype());
        let Some(part) = slice.try_slice(range.clone()) else {
            return Err(Error::Device {
                device: format!("GPU {}", slice.ordinal()),
                operation: "hand over",
                message: format!("elements {range:?} of {}", slice.len()),
            });
        };
        let at = part.device_ptr(&stream).0;
        Ok(Self { sharing: CrossStreamAccess::new(stream), at, dtype, len, owner: Box::new(owner) })
    }

    /// The owner of the elements.
    pub fn owner(&self) -> &(dyn Any + Send + Sync) {
        &*self.owner
    }

    /// The elements as the source of a copy.
    pub fn source(&self) -> GpuSource<'_> {
        GpuSource { sharing: &self.sharing, at: self.at, dtype: self.dtype, len: self.len }
    }
}

impl std::fmt::Debug for SharedSlice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.source().fmt(f)
    }
}

impl OnDevice for SharedSlice {
    fn elements(&self) -> usize {
        self.len
    }

    fn width(&self) -> u64 {
        self.dtype.width() as u64
    }
}

impl Drop for SharedSlice {
    fn drop(&mut self) {
        self.sharing.give_back();
    }
}

impl<'a> GpuSource<'a> {
    /// The elements of a message, if they are on a GPU.
    pub fn of(elements: &'a dyn OnDevice) -> Option<Self> {
        let elements: &dyn Any = elements;
        let array = elements.downcast_ref().and_then(Self::of_array);
        array.or_else(|| elements.downcast_ref().map(SharedSlice::source))
    }
}
