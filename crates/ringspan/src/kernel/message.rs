//! Messages: parts of tensors, packed in the wire type.

#[cfg(feature = "cuda")]
use super::cuda::GpuArray;
use super::device::Device;
use super::view::Stored;
use super::{Data, Kernel, View};
use crate::comm::{Buffer, Communicator};
use crate::error::{Error, Result};
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
#[cfg(feature = "cuda")]
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

/// Some heads and rows of a tensor.
#[derive(Debug)]
pub(crate) struct TensorSlice<'a> {
    pub(crate) view: View<'a>,
    pub(crate) heads: Range<usize>,
    pub(crate) rows: &'a [Range<usize>],
}

impl TensorSlice<'_> {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.rows.iter().map(ExactSizeIterator::len).sum::<usize>() * self.heads.len() * self.view.dim
    }
}

impl Kernel {
    /// Packs the slices one after the other, each as `[rows, heads, dim]`, in type `to`.
    pub(crate) fn pack(&self, to: Stored, slices: &[TensorSlice]) -> Result<Buffer> {
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
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => Ok(Buffer::Device(Arc::new(cuda.pack(to, slices)?))),
        }
    }

    /// An empty message for `len` elements, which [`append`](Self::append) adds.
    pub(crate) fn room(&self, stored: Stored, len: usize) -> Result<Buffer> {
        match &self.0 {
            Device::Cpu(_) => Ok(with_capacity(stored, len)),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => Ok(Buffer::Device(Arc::new(cuda.array(stored, len)?))),
        }
    }

    /// Appends a message after the first `filled` elements, which have been written.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub(crate) fn append(&self, all: &mut Buffer, filled: usize, message: Data) -> Result<()> {
        match (all, message) {
            (Buffer::F32(all), Data::F32(message)) => all.extend_from_slice(message),
            (Buffer::U16(all), Data::Bf16(message)) => all.extend_from_slice(message.reinterpret_cast()),
            (Buffer::U16(all), Data::F16(message)) => all.extend_from_slice(message.reinterpret_cast()),
            #[cfg(feature = "cuda")]
            (all @ Buffer::Device(_), Data::Gpu(message)) => {
                if let (Device::Cuda(cuda), Some(array)) = (&self.0, array(all)) {
                    cuda.append(&mut array.clone(), filled, message)?;
                }
            }
            _ => (),
        }
        Ok(())
    }

    /// A message in the form that `comm` can send: if it cannot pass on GPU memory, a copy in the memory of the CPU.
    pub(crate) fn outgoing(&self, message: Arc<Buffer>, comm: &dyn Communicator) -> Result<Arc<Buffer>> {
        #[cfg(feature = "cuda")]
        if let (Device::Cuda(cuda), Some(array)) = (&self.0, array(&message)) {
            if comm.passes_device_memory() {
                array.share(cuda)?;
                return Ok(message);
            }
            return Ok(Arc::new(downloaded(cuda, array)?));
        }
        let _ = comm;
        Ok(message)
    }

    /// Brings a received message to this kernel's device.
    pub(crate) fn incoming(&self, message: Arc<Buffer>, stored: Stored) -> Result<Arc<Buffer>> {
        #[cfg(feature = "cuda")]
        match (&self.0, array(&message)) {
            (Device::Cuda(cuda), Some(array)) if !array.is_on(cuda.gpu()) => {
                return Ok(Arc::new(Buffer::Device(Arc::new(cuda.copied(array.data())?))));
            }
            (Device::Cuda(cuda), None) => {
                if let Some(data) = read(&message, stored) {
                    return Ok(Arc::new(Buffer::Device(Arc::new(cuda.upload(data)?))));
                }
            }
            // A rank with a GPU sent it to a rank that computes on the CPU.
            (Device::Cpu(_), Some(array)) => {
                let cuda = super::cuda::Cuda::new(array.data().gpu())?;
                return Ok(Arc::new(downloaded(&cuda, array)?));
            }
            _ => (),
        }
        let _ = stored;
        Ok(message)
    }
}

/// The elements of a message, in place; `None` if they have another storage type.
pub(crate) fn read(message: &Buffer, stored: Stored) -> Option<Data<'_>> {
    match (stored, message) {
        (Stored::F32, Buffer::F32(values)) => Some(Data::F32(values)),
        (Stored::Bf16, Buffer::U16(bits)) => Some(Data::Bf16(bits.reinterpret_cast())),
        (Stored::F16, Buffer::U16(bits)) => Some(Data::F16(bits.reinterpret_cast())),
        #[cfg(feature = "cuda")]
        (stored, message) => array(message).map(|array| Data::Gpu(array.data())).filter(|data| data.stored() == stored),
        #[cfg(not(feature = "cuda"))]
        _ => None,
    }
}

/// The GPU array in a message, if it has one.
#[cfg(feature = "cuda")]
fn array(message: &Buffer) -> Option<&GpuArray> {
    match message {
        Buffer::Device(elements) => (&**elements as &dyn Any).downcast_ref(),
        _ => None,
    }
}

#[cfg(feature = "cuda")]
fn downloaded(cuda: &super::cuda::Cuda, array: &GpuArray) -> Result<Buffer> {
    let data = array.data();
    if data.stored() == Stored::F32 {
        let mut values = vec![0.0; data.len()];
        cuda.download(data, &mut values)?;
        return Ok(Buffer::F32(values));
    }
    let mut bits = vec![0u16; data.len()];
    cuda.download(data, &mut bits)?;
    Ok(Buffer::U16(bits))
}

fn with_capacity(stored: Stored, len: usize) -> Buffer {
    match stored {
        Stored::F32 => Buffer::F32(Vec::with_capacity(len)),
        Stored::Bf16 | Stored::F16 => Buffer::U16(Vec::with_capacity(len)),
    }
}

/// Appends a row, rounded to the message's type if necessary; a number beyond that type's range is an error.
fn push(packed: &mut Buffer, to: Stored, row: Data) -> Result<()> {
    match (packed, to, row) {
        (Buffer::F32(packed), _, Data::F32(row)) => packed.extend_from_slice(row),
        (Buffer::F32(packed), _, row) => packed.extend_from_slice(&row.to_f32()),
        (Buffer::U16(packed), Stored::Bf16, Data::Bf16(row)) => packed.extend_from_slice(row.reinterpret_cast()),
        (Buffer::U16(packed), Stored::F16, Data::F16(row)) => packed.extend_from_slice(row.reinterpret_cast()),
        (Buffer::U16(packed), Stored::F16, row) => {
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
