//! The type in which tensors travel between ranks.

use crate::comm::Buffer;
use crate::error::{Error, Result};
use crate::kernel::{self, DType, Data, View};

/// The type in which queries, keys and values travel between ranks: their storage type, unless a
/// [group](super::Group::with_wire) sets another.
///
/// Partial results and gradients always travel in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wire {
    /// 32-bit floats.
    #[default]
    F32,
    /// bfloat16: lossless for tensors stored in bfloat16.
    Bf16,
    /// IEEE half precision: lossless for tensors stored in it.
    F16,
}

impl Wire {
    /// The common storage type of the tensors, or f32 if they differ.
    pub(super) fn of(views: [&View; 3]) -> Self {
        let [first, ..] = views.map(|view| match view.data.dtype() {
            DType::F32 => Self::F32,
            DType::Bf16 => Self::Bf16,
            DType::F16 => Self::F16,
        });
        let same = |view: &&View| view.data.dtype() == views[0].data.dtype();
        if views.iter().all(same) { first } else { Self::F32 }
    }

    /// Bytes of a number.
    pub(super) fn width(self) -> u64 {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// Bits of a message tag that tell f16 from bf16: both are sent as 16-bit words, and a rank must not read one as the
    /// other.
    pub(super) fn mark(self) -> u64 {
        if self == Self::F16 { 1 << 62 } else { 0 }
    }

    /// The storage type of messages of this wire type.
    pub(super) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::Bf16,
            Self::F16 => DType::F16,
        }
    }

    /// The numbers of a message, in place; an error unless there are `expected` of them in this wire type.
    pub(super) fn read<'a>(self, buffer: &'a Buffer, expected: usize, operation: &'static str) -> Result<Data<'a>> {
        let Some(data) = kernel::read(buffer, self.dtype()) else {
            return Err(Error::Layout(format!("{operation}: received a message that is not of wire type {self:?}")));
        };
        if data.len() != expected {
            return Err(Error::Shape {
                operation,
                what: "a received block",
                expected,
                actual: data.len(),
                shape: "rows of the owner's tokens".into(),
            });
        }
        Ok(data)
    }
}

/// The numbers of an f32 message, in place; an error unless there are `expected` of them.
pub(super) fn floats<'a>(buffer: &'a Buffer, expected: usize, operation: &'static str) -> Result<Data<'a>> {
    Wire::F32.read(buffer, expected, operation)
}
