//! The type in which keys and values travel.

use crate::comm::Buffer;
use crate::error::{Error, Result};
use crate::kernel::{Data, View};
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use std::ops::Range;

/// The type in which queries, keys and values travel between ranks: their storage type.
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
    /// Some heads of some tokens of tensors that follow each other, each `[tokens, heads, dim]`.
    pub(super) fn pack<'a>(
        self,
        parts: impl IntoIterator<Item = (&'a View<'a>, Range<usize>)>,
        tokens: impl Iterator<Item = usize> + Clone,
    ) -> Buffer {
        let mut packed = self.empty();
        for (view, heads) in parts {
            for token in tokens.clone() {
                heads.clone().for_each(|head| push(&mut packed, self, view.at(token, head)));
            }
        }
        packed
    }

    /// No numbers yet.
    pub(super) fn empty(self) -> Buffer {
        match self {
            Self::F32 => Buffer::F32(Vec::new()),
            Self::Bf16 | Self::F16 => Buffer::U16(Vec::new()),
        }
    }

    /// The numbers of a message of `expected` elements, where they are.
    pub(super) fn read<'a>(self, buffer: &'a Buffer, expected: usize, operation: &'static str) -> Result<Data<'a>> {
        let data = match (self, buffer) {
            (Self::F32, Buffer::F32(values)) => Data::F32(values),
            (Self::Bf16, Buffer::U16(bits)) => Data::Bf16(bits.reinterpret_cast()),
            (Self::F16, Buffer::U16(bits)) => Data::F16(bits.reinterpret_cast()),
            _ => {
                return Err(Error::Layout(format!(
                    "{operation}: received a message that is not of wire type {self:?}"
                )));
            }
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
pub(super) fn floats<'a>(buffer: &'a Buffer, expected: usize, operation: &'static str) -> Result<&'a [f32]> {
    match Wire::F32.read(buffer, expected, operation)? {
        Data::F32(values) => Ok(values),
        _ => Ok(&[]),
    }
}

/// Appends a row, rounded to the wire's type if it is stored in another.
fn push(packed: &mut Buffer, wire: Wire, row: Data) {
    match (packed, wire, row) {
        (Buffer::F32(packed), _, Data::F32(row)) => packed.extend_from_slice(row),
        (Buffer::F32(packed), _, row) => packed.extend_from_slice(&row.to_f32()),
        (Buffer::U16(packed), Wire::Bf16, Data::Bf16(row)) => packed.extend_from_slice(row.reinterpret_cast()),
        (Buffer::U16(packed), Wire::F16, Data::F16(row)) => packed.extend_from_slice(row.reinterpret_cast()),
        (Buffer::U16(packed), Wire::F16, row) => {
            packed.extend(row.to_f32().iter().map(|x| f16::from_f32(*x).to_bits()));
        }
        (Buffer::U16(packed), _, row) => packed.extend(row.to_f32().iter().map(|x| bf16::from_f32(*x).to_bits())),
        (Buffer::U64(_) | Buffer::U8(_), ..) => (),
    }
}

/// Appends what a message holds.
pub(super) fn append(packed: &mut Buffer, message: &Buffer) {
    match (packed, message) {
        (Buffer::F32(packed), Buffer::F32(message)) => packed.extend_from_slice(message),
        (Buffer::U16(packed), Buffer::U16(message)) => packed.extend_from_slice(message),
        _ => (),
    }
}
