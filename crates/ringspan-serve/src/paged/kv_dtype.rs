//! The types in which a cache holds keys and values.

use crate::error::{Error, Result};
use crate::model::Model;
use candle_core::DType;
use ringspan::kernel::BlockQ8_0;
use std::str::FromStr;

/// The type in which a cache holds keys and values. They are rounded to it once, when they are written, on every mesh alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvDtype {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// Blocks of 32 numbers, each an 8-bit integer, with a common factor in f16: 8.5 bits a number. The widths of heads must be
    /// multiples of 32.
    Q8_0,
}

impl KvDtype {
    /// The type in which the model computes.
    ///
    /// # Errors
    /// A model that computes in another type.
    pub(super) fn of(model: &Model) -> Result<Self> {
        match model.computed_in() {
            DType::F32 => Ok(Self::F32),
            DType::BF16 => Ok(Self::Bf16),
            other => Err(Error::Step(format!("the paged cache holds F32 or BF16, not {other:?}"))),
        }
    }

    /// Checks that a cache can hold the keys and values of a model in this type.
    ///
    /// # Errors
    /// Widths of heads that do not consist of blocks.
    pub fn check(self, model: &Model) -> Result<()> {
        let widths = model.decoder().head_dims();
        match widths.iter().find(|width| self == Self::Q8_0 && !width.is_multiple_of(BlockQ8_0::LEN)) {
            None => Ok(()),
            Some(width) => Err(Error::KvDtype { width: *width, block: BlockQ8_0::LEN }),
        }
    }

    /// Bytes of `numbers` numbers.
    pub(super) fn bytes(self, numbers: usize) -> usize {
        match self {
            Self::F32 => numbers.saturating_mul(4),
            Self::Bf16 => numbers.saturating_mul(2),
            Self::Q8_0 => (numbers / BlockQ8_0::LEN).saturating_mul(size_of::<BlockQ8_0>()),
        }
    }
}

impl FromStr for KvDtype {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            "q8_0" => Ok(Self::Q8_0),
            other => Err(format!("{other} is no type of keys and values; possible are f32, bf16 and q8_0")),
        }
    }
}
