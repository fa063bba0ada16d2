//! Messages: parts of tensors, packed in the wire type.

use super::device::Device;
use super::device_array::DeviceArray;
use super::{DType, Data, Kernel, TensorSlice};
use crate::comm::{Buffer, Communicator};
use crate::error::{Error, Result};
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use std::any::Any;
use std::sync::Arc;

impl Kernel {
    /// Packs the slices one after the other, each as `[rows, heads, dim]`, in type `to`.
    pub(crate) fn pack(&self, to: DType, slices: &[TensorSlice]) -> Result<Buffer> {
        match &self.0 {
            Device::Cpu(_) => {
                // The whole capacity is reserved: a growing vector would take up to twice the size.
                let mut packed = with_capacity(to, slices.iter().map(TensorSlice::len).sum());
                for TensorSlice { view, heads, rows } in slices {
                    for row in rows.iter().flat_map(Clone::clone) {
                        heads.clone().try_for_each(|head| push(&mut packed, to, view.at(row, head)))?;
                    }
                }
                Ok(packed)
            }
            Device::Backend(backend) => Ok(Buffer::Device(Arc::new(backend.pack(to, slices)?))),
        }
    }

    /// An empty message for `len` elements, which [`append`](Self::append) adds.
    pub(crate) fn allocate_message(&self, dtype: DType, len: usize) -> Result<Buffer> {
        match &self.0 {
            Device::Cpu(_) => Ok(with_capacity(dtype, len)),
            Device::Backend(backend) => Ok(Buffer::Device(Arc::new(backend.allocate(dtype, len)?))),
        }
    }

    /// Appends a message after the first `filled` elements, which have been written.
    pub(crate) fn append(&self, all: &mut Buffer, filled: usize, message: Data) -> Result<()> {
        match (all, message) {
            (Buffer::F32(all), Data::F32(message)) => all.extend_from_slice(message),
            (Buffer::U16(all), Data::Bf16(message)) => all.extend_from_slice(message.reinterpret_cast()),
            (Buffer::U16(all), Data::F16(message)) => all.extend_from_slice(message.reinterpret_cast()),
            (all @ Buffer::Device(_), Data::Device(message)) => {
                if let (Device::Backend(backend), Some(array)) = (&self.0, array(all)) {
                    backend.append(&mut array.clone(), filled, message)?;
                }
            }
            _ => (),
        }
        Ok(())
    }

    /// A message in the form that `comm` can send: if it cannot pass on the memory of a device, a copy in that of the CPU.
    pub(crate) fn outgoing(&self, message: Arc<Buffer>, comm: &dyn Communicator) -> Result<Arc<Buffer>> {
        let (Device::Backend(backend), Some(array)) = (&self.0, array(&message)) else { return Ok(message) };
        if comm.passes_device_memory() {
            backend.share(array)?;
            return Ok(message);
        }
        downloaded(array.dtype(), array.len(), |to| backend.download(array.data(), to)).map(Arc::new)
    }

    /// Brings a received message to this kernel's device.
    pub(crate) fn incoming(&self, message: Arc<Buffer>, dtype: DType) -> Result<Arc<Buffer>> {
        let copy = match (&self.0, array(&message)) {
            (Device::Backend(backend), Some(array)) if !backend.holds(array.memory()) => backend.copy(array.data())?,
            (Device::Backend(backend), None) => match read(&message, dtype) {
                Some(data) => backend.upload(data)?,
                None => return Ok(message),
            },
            // A rank with a device sent it to a rank that computes on the CPU.
            (Device::Cpu(_), Some(array)) => {
                let from = array.data();
                return downloaded(from.dtype(), from.len(), |to| from.memory().download(from.start(), to))
                    .map(Arc::new);
            }
            _ => return Ok(message),
        };
        Ok(Arc::new(Buffer::Device(Arc::new(copy))))
    }
}

/// The elements of a message, in place; `None` if they have another storage type.
pub(crate) fn read(message: &Buffer, dtype: DType) -> Option<Data<'_>> {
    match (dtype, message) {
        (DType::F32, Buffer::F32(values)) => Some(Data::F32(values)),
        (DType::Bf16, Buffer::U16(bits)) => Some(Data::Bf16(bits.reinterpret_cast())),
        (DType::F16, Buffer::U16(bits)) => Some(Data::F16(bits.reinterpret_cast())),
        (dtype, message) => array(message).map(|array| Data::Device(array.data())).filter(|data| data.dtype() == dtype),
    }
}

/// The array of a device in a message, if it has one.
fn array(message: &Buffer) -> Option<&DeviceArray> {
    match message {
        Buffer::Device(elements) => (&**elements as &dyn Any).downcast_ref(),
        _ => None,
    }
}

/// A message of `len` elements that `download` writes.
fn downloaded(dtype: DType, len: usize, download: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Buffer> {
    if dtype == DType::F32 {
        let mut values = vec![0f32; len];
        download(bytemuck::cast_slice_mut(&mut values))?;
        return Ok(Buffer::F32(values));
    }
    let mut bits = vec![0u16; len];
    download(bytemuck::cast_slice_mut(&mut bits))?;
    Ok(Buffer::U16(bits))
}

fn with_capacity(stored: DType, len: usize) -> Buffer {
    match stored {
        DType::F32 => Buffer::F32(Vec::with_capacity(len)),
        DType::Bf16 | DType::F16 => Buffer::U16(Vec::with_capacity(len)),
    }
}

/// Appends a row, rounded to the message's type if necessary; a number beyond that type's range is an error.
fn push(packed: &mut Buffer, to: DType, row: Data) -> Result<()> {
    match (packed, to, row) {
        (Buffer::F32(packed), _, Data::F32(row)) => packed.extend_from_slice(row),
        (Buffer::F32(packed), _, row) => packed.extend_from_slice(&row.to_f32()),
        (Buffer::U16(packed), DType::Bf16, Data::Bf16(row)) => packed.extend_from_slice(row.reinterpret_cast()),
        (Buffer::U16(packed), DType::F16, Data::F16(row)) => packed.extend_from_slice(row.reinterpret_cast()),
        (Buffer::U16(packed), DType::F16, row) => {
            for x in &*row.to_f32() {
                let short = f16::from_f32(*x);
                check_range(*x, short.is_finite(), "f16", f16::MAX.to_f32())?;
                packed.push(short.to_bits());
            }
        }
        (Buffer::U16(packed), _, row) => {
            for x in &*row.to_f32() {
                let short = bf16::from_f32(*x);
                check_range(*x, short.is_finite(), "bf16", bf16::MAX.to_f32())?;
                packed.push(short.to_bits());
            }
        }
        (Buffer::U64(_) | Buffer::U8(_) | Buffer::Device(_), ..) => (),
    }
    Ok(())
}

/// An error if a finite number overflows in the message's type.
fn check_range(x: f32, fits: bool, wire: &'static str, limit: f32) -> Result<()> {
    if fits || !x.is_finite() {
        return Ok(());
    }
    Err(Error::WireRange { value: format!("{x:?}"), wire, limit: format!("{limit:?}") })
}
