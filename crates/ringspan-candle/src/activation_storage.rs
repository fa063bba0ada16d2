//! The type in which activations are stored between the passes.

use std::{fmt, str::FromStr};

/// The type in which activations are stored between the passes. It does not change the type in which layers compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Storage {
    /// Activations are stored in the type in which they were computed, so nothing is lost.
    #[default]
    F32,
    /// Activations take half the memory of f32; rounding changes each number by at most 2^-9 of itself.
    Bf16,
}

impl FromStr for Storage {
    type Err = ringspan::Error;

    fn from_str(given: &str) -> Result<Self, Self::Err> {
        match given {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            _ => Err(ringspan::Error::Unknown { what: "activations", given: given.into(), possible: "f32, bf16" }),
        }
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

impl Storage {
    /// Bytes of one stored number.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}
