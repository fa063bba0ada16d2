//! The type in which keys and values travel.

use crate::comm::Buffer;
use crate::error::{Error, Result};
use half::{bf16, f16};
use std::borrow::Cow;

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
    pub(super) fn pack(self, values: Vec<f32>) -> Buffer {
        match self {
            Self::F32 => Buffer::F32(values),
            Self::Bf16 => Buffer::U16(values.into_iter().map(|x| bf16::from_f32(x).to_bits()).collect()),
            Self::F16 => Buffer::U16(values.into_iter().map(|x| f16::from_f32(x).to_bits()).collect()),
        }
    }

    /// The values of a message of `expected` elements; borrowed where they need no conversion.
    pub(super) fn unpack<'a>(
        self,
        buffer: &'a Buffer,
        expected: usize,
        operation: &'static str,
    ) -> Result<Cow<'a, [f32]>> {
        let values: Cow<'a, [f32]> = match (self, buffer) {
            (Self::F32, Buffer::F32(values)) => Cow::Borrowed(values),
            (Self::Bf16, Buffer::U16(bits)) => bits.iter().map(|&bits| bf16::from_bits(bits).to_f32()).collect(),
            (Self::F16, Buffer::U16(bits)) => bits.iter().map(|&bits| f16::from_bits(bits).to_f32()).collect(),
            _ => {
                return Err(Error::Layout(format!(
                    "{operation}: received a message that is not of wire type {self:?}"
                )));
            }
        };
        if values.len() != expected {
            return Err(Error::Shape {
                operation,
                what: "a received block",
                expected,
                actual: values.len(),
                shape: "keys and values of the owner's tokens".into(),
            });
        }
        Ok(values)
    }
}
