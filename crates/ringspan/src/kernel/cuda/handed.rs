//! What another library holds on a GPU, as a message.

use super::super::view::Stored;
use super::memory::{GpuArray, GpuElement};
use super::sharing::{GpuSource, Sharing};
use crate::comm::OnDevice;
use crate::error::{Error, Result};
use cudarc::driver::{CudaSlice, DevicePtr};
use std::any::Any;
use std::ops::Range;

/// Elements that another library holds on a GPU, handed to other ranks where they are: they stay there as long as a rank has
/// this. A communicator that [hands over](crate::comm::Communicator::hands_over) gives ranks of this process the same, with its
/// owner, and those of others a [`GpuArray`] of the same elements.
pub struct Handed {
    sharing: Sharing,
    at: u64,
    stored: Stored,
    len: usize,
    /// Goes when all streams that read the elements are past them.
    owner: Box<dyn Any + Send + Sync>,
}

impl Handed {
    /// These elements of `slice`, which `owner` keeps. What was started on the slice's stream before comes before whoever reads
    /// them; the slice goes back, or is written, on that stream behind all of them.
    ///
    /// # Safety
    /// As long as `owner` is there, the elements stay where they are, and nobody writes to them.
    ///
    /// # Errors
    /// A range outside the slice.
    pub unsafe fn new<T: GpuElement>(
        slice: &CudaSlice<T>,
        range: Range<usize>,
        owner: impl Any + Send + Sync,
    ) -> Result<Self> {
        let stream = slice.stream().clone();
        let (len, stored) = (range.len(), T::data(&[]).stored());
        let Some(part) = slice.try_slice(range.clone()) else {
            return Err(Error::Device {
                device: format!("GPU {}", slice.ordinal()),
                operation: "hand over",
                message: format!("elements {range:?} of {}", slice.len()),
            });
        };
        let at = part.device_ptr(&stream).0;
        Ok(Self { sharing: Sharing::new(stream), at, stored, len, owner: Box::new(owner) })
    }

    /// Who keeps the elements.
    pub fn owner(&self) -> &(dyn Any + Send + Sync) {
        &*self.owner
    }

    /// The elements.
    pub fn source(&self) -> GpuSource<'_> {
        GpuSource { sharing: &self.sharing, at: self.at, stored: self.stored, len: self.len }
    }
}

impl std::fmt::Debug for Handed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.source().fmt(f)
    }
}

impl OnDevice for Handed {
    fn elements(&self) -> usize {
        self.len
    }

    fn width(&self) -> u64 {
        self.stored.width() as u64
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        self.sharing.give_back();
    }
}

impl<'a> GpuSource<'a> {
    /// The elements of a message, if they lie on a GPU.
    pub fn of(elements: &'a dyn OnDevice) -> Option<Self> {
        let elements: &dyn Any = elements;
        let array = elements.downcast_ref().map(GpuArray::source);
        array.or_else(|| elements.downcast_ref().map(Handed::source))
    }
}
