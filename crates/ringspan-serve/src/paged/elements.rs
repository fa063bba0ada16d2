//! Numbers of the cache and of tensors in the memory of the CPU.

use super::kv_dtype::KvDtype;
use crate::error::{Error, Result};
use candle_core::{CpuStorage, DType, Storage, Tensor};
use half::bf16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::vec::HalfBitsVecExt;
use half::vec::HalfFloatVecExt;
use ringspan::comm::Buffer;
use ringspan::kernel::{BlockQ8_0, Data, QuantizedSlice};
use std::ops::Range;

/// The smallest size of pages of memory, which exist as a whole or not at all.
const MEMORY_PAGE: usize = 4096;

/// A list of numbers.
#[derive(Debug)]
pub(super) enum Elements {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    Q8_0(Vec<BlockQ8_0>),
}

impl Elements {
    /// `len` zeros, which take memory when they are first written.
    pub(super) fn zeros(dtype: KvDtype, len: usize) -> Self {
        match dtype {
            KvDtype::F32 => Self::F32(vec![0.0; len]),
            KvDtype::Bf16 => Self::Bf16(vec![0u16; len].reinterpret_into()),
            KvDtype::Q8_0 => Self::Q8_0(BlockQ8_0::zeros(len / BlockQ8_0::LEN)),
        }
    }

    /// Writes zeros in each memory page of a range of numbers, which must be zeros. Ranges of numbers in blocks are rounded down.
    pub(super) fn prefault(&mut self, range: Range<usize>) {
        fn write<T: Copy>(all: &mut [T], zero: T) {
            all.iter_mut().step_by(MEMORY_PAGE / size_of::<T>()).for_each(|number| *number = zero);
        }
        match self {
            Self::F32(all) => write(&mut all[range], 0.0),
            Self::Bf16(all) => write(&mut all[range], bf16::ZERO),
            Self::Q8_0(all) => {
                let zero = BlockQ8_0::quantize(&[0.0; BlockQ8_0::LEN]);
                write(&mut all[range.start / BlockQ8_0::LEN..range.end / BlockQ8_0::LEN], zero);
            }
        }
    }

    /// No numbers of a type in which models compute, with room for `len`.
    pub(super) fn with_capacity(dtype: DType, len: usize) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16(Vec::with_capacity(len)),
            _ => Self::F32(Vec::with_capacity(len)),
        }
    }

    pub(super) fn data(&self) -> Data<'_> {
        match self {
            Self::F32(values) => Data::F32(values),
            Self::Bf16(values) => Data::Bf16(values),
            Self::Q8_0(blocks) => Data::Q8_0(QuantizedSlice::new(blocks)),
        }
    }

    /// Appends numbers of the same type.
    pub(super) fn extend(&mut self, from: Data) -> Result<()> {
        match (self, from) {
            (Self::F32(to), Data::F32(from)) => to.extend_from_slice(from),
            (Self::Bf16(to), Data::Bf16(from)) => to.extend_from_slice(from),
            (to, from) => return Err(other_type(to, from)),
        }
        Ok(())
    }

    /// Overwrites the numbers from `at` on with others, rounded to the type of these. Those in blocks must begin and end with a block.
    pub(super) fn write(&mut self, at: usize, from: Data) {
        match self {
            Self::F32(to) => from.copy_to(&mut to[at..at + from.len()]),
            Self::Bf16(to) => match from {
                Data::Bf16(from) => to[at..at + from.len()].copy_from_slice(from),
                _ => to[at..at + from.len()].convert_from_f32_slice(&from.to_f32()),
            },
            Self::Q8_0(blocks) => {
                let numbers = from.to_f32();
                let (new, _) = numbers.as_chunks();
                let first = at / BlockQ8_0::LEN;
                let old = &mut blocks[first..first + new.len()];
                old.iter_mut().zip(new).for_each(|(block, numbers)| *block = BlockQ8_0::quantize(numbers));
            }
        }
    }

    /// Copies numbers; those in blocks must begin and end with a block.
    pub(super) fn copy_within(&mut self, from: Range<usize>, to: usize) {
        match self {
            Self::F32(values) => values.copy_within(from, to),
            Self::Bf16(values) => values.copy_within(from, to),
            Self::Q8_0(blocks) => {
                blocks.copy_within(from.start / BlockQ8_0::LEN..from.end / BlockQ8_0::LEN, to / BlockQ8_0::LEN);
            }
        }
    }

    /// The numbers as a message, in a type in which models compute.
    pub(super) fn into_message(self) -> Buffer {
        match self {
            Self::F32(values) => Buffer::F32(values),
            Self::Bf16(values) => Buffer::U16(values.reinterpret_into()),
            Self::Q8_0(_) => Buffer::F32(self.data().to_f32().into_owned()),
        }
    }
}

fn other_type(to: &Elements, from: Data) -> Error {
    Error::Step(format!("numbers of type {:?} among those of {:?}", from.dtype(), to.data().dtype()))
}

/// The numbers of a message that [`Elements::into_message`] made.
pub(super) fn of_message(message: &Buffer, dtype: DType) -> Result<Data<'_>> {
    match (message, dtype) {
        (Buffer::F32(values), DType::F32) => Ok(Data::F32(values)),
        (Buffer::U16(bits), DType::BF16) => Ok(Data::Bf16(bits.reinterpret_cast())),
        (other, dtype) => Err(Error::Step(format!("{} numbers arrived that are not {dtype:?}", other.len()))),
    }
}

/// Calls `work` with the numbers of a contiguous tensor on the CPU.
pub(super) fn of_tensor<R>(tensor: &Tensor, work: impl FnOnce(Data) -> Result<R>) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else {
        return Err(Error::Step(format!("a tensor with strides {:?} is not contiguous", layout.stride())));
    };
    let all = match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => Data::F32(values),
        Storage::Cpu(CpuStorage::BF16(values)) => Data::Bf16(values),
        _ => {
            let (dtype, device) = (tensor.dtype(), tensor.device());
            return Err(Error::Step(format!(
                "the paged cache takes F32 or BF16 on the CPU, not {dtype:?} on {device:?}"
            )));
        }
    };
    // An empty tensor may start beyond the end of its storage.
    work(if start < end { all.slice(start..end) } else { all.slice(0..0) })
}
