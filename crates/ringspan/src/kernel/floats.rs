//! f32 numbers of a rank in the memory of the CPU or of a device.

use super::Data;
use super::device_array::{DeviceArray, DeviceSliceMut};
use crate::comm::Buffer;
use std::sync::Arc;

/// Numbers on the device of the kernel that computed them; [`Kernel::to_host`](super::Kernel::to_host) copies them to the
/// CPU.
#[derive(Debug, Clone)]
pub enum Floats {
    /// In the memory of the CPU.
    Host(Vec<f32>),
    /// In the memory of a device.
    Device(DeviceArray),
}

/// Mutable numbers, to which gradients are added.
#[derive(Debug)]
pub enum FloatsMut<'a> {
    /// In the memory of the CPU.
    Host(&'a mut [f32]),
    /// In the memory of a device.
    Device(DeviceSliceMut<'a>),
}

impl Default for Floats {
    fn default() -> Self {
        Self::Host(Vec::new())
    }
}

impl Floats {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.data().len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Borrows the numbers, for views.
    pub fn data(&self) -> Data<'_> {
        match self {
            Self::Host(values) => Data::F32(values),
            Self::Device(array) => Data::Device(array.data()),
        }
    }

    pub(crate) fn all_mut(&mut self) -> FloatsMut<'_> {
        match self {
            Self::Host(values) => FloatsMut::Host(values),
            Self::Device(array) => FloatsMut::Device(array.all_mut()),
        }
    }

    pub(crate) fn split_at_mut(&mut self, at: usize) -> (FloatsMut<'_>, FloatsMut<'_>) {
        match self {
            Self::Host(values) => {
                let (first, second) = values.split_at_mut(at);
                (FloatsMut::Host(first), FloatsMut::Host(second))
            }
            Self::Device(array) => {
                let (first, second) = array.split_at_mut(at);
                (FloatsMut::Device(first), FloatsMut::Device(second))
            }
        }
    }

    /// Splits the numbers into consecutive parts of these lengths; on a device the parts share memory.
    pub(crate) fn parts(self, lens: impl Iterator<Item = usize>) -> Vec<Self> {
        let mut from = 0;
        let part = |len: usize| {
            let range = from..from + len;
            from = range.end;
            match &self {
                Self::Host(values) => Self::Host(values[range].to_vec()),
                Self::Device(array) => Self::Device(array.part(range)),
            }
        };
        lens.map(part).collect()
    }

    pub(crate) fn into_message(self) -> Buffer {
        match self {
            Self::Host(values) => Buffer::F32(values),
            Self::Device(array) => Buffer::Device(Arc::new(array)),
        }
    }
}

impl FloatsMut<'_> {
    /// Borrows the numbers for reading.
    pub fn data(&self) -> Data<'_> {
        match self {
            Self::Host(values) => Data::F32(values),
            Self::Device(values) => Data::Device(values.data()),
        }
    }

    /// The slice, if it is in the memory of the CPU.
    pub(super) fn host(&mut self) -> Option<&mut [f32]> {
        match self {
            Self::Host(values) => Some(values),
            Self::Device(_) => None,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            Self::Device(values) => values.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a> From<&'a mut [f32]> for FloatsMut<'a> {
    fn from(values: &'a mut [f32]) -> Self {
        Self::Host(values)
    }
}

impl<'a> From<&'a mut Vec<f32>> for FloatsMut<'a> {
    fn from(values: &'a mut Vec<f32>) -> Self {
        Self::Host(values)
    }
}
