//! The type in which keys and values travel.

use crate::comm::Buffer;
use crate::error::{Error, Result};
use crate::kernel::{self, Data, Stored, View};

/// The type in which queries, keys and values travel between ranks: the one they are stored in, unless a
/// [group](super::Group::with_wire) says otherwise.
///
/// Partial results and gradients always travel in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wire {
    /// 32-bit floats.
    #[default]
    F32,
    /// bfloat16: lossless for tensors stored as such.
    Bf16,
    /// IEEE half precision: lossless for tensors stored as such.
    F16,
}

impl Wire {
    /// The type in which all of these are stored, or f32, which holds them all.
    pub(super) fn of(views: [&View; 3]) -> Self {
        let [first, ..] = views.map(|view| match view.data.stored() {
            Stored::F32 => Self::F32,
            Stored::Bf16 => Self::Bf16,
            Stored::F16 => Self::F16,
        });
        let same = |view: &&View| view.data.stored() == views[0].data.stored();
        if views.iter().all(same) { first } else { Self::F32 }
    }

    /// Bytes of a number.
    pub(super) fn width(self) -> u64 {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// What a tag has besides its number: both short types are 16 bits, and ranks that disagree must not take one for the
    /// other.
    pub(super) fn mark(self) -> u64 {
        if self == Self::F16 { 1 << 62 } else { 0 }
    }

    /// What messages are stored in.
    pub(super) fn stored(self) -> Stored {
        match self {
            Self::F32 => Stored::F32,
            Self::Bf16 => Stored::Bf16,
            Self::F16 => Stored::F16,
        }
    }

    /// The numbers of a message of `expected` elements, where they are.
    pub(super) fn read<'a>(self, buffer: &'a Buffer, expected: usize, operation: &'static str) -> Result<Data<'a>> {
        let Some(data) = kernel::read(buffer, self.stored()) else {
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

/// The numbers of a message in f32 of `expected` elements.
pub(super) fn floats<'a>(buffer: &'a Buffer, expected: usize, operation: &'static str) -> Result<Data<'a>> {
    Wire::F32.read(buffer, expected, operation)
}
