//! The type in which a model computes.

use candle_core::DType;
use ringspan::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The type in which weights, activations and cached keys and values are stored and multiplied.
///
/// With either type, sums are f32, and so is the inner arithmetic of layers: norms, rotary embeddings, gates, the softmax of
/// attention and of routers, losses. Logits are f32 and never rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// Computes in f32, without further rounding.
    #[default]
    F32,
    /// Rounds each stored number by at most 2^-9 of itself, takes half the memory and, on tensor cores, is many times
    /// as fast. CPUs multiply in bf16 where they can (AVX512-BF16), and elsewhere in f32.
    Bf16,
}

impl Precision {
    /// The type of tensors.
    #[must_use]
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

impl FromStr for Precision {
    type Err = Error;

    fn from_str(given: &str) -> Result<Self> {
        match given {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            _ => Err(Error::Unknown { what: "dtype", given: given.into(), possible: "f32, bf16" }),
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_read_as_they_are_written_and_others_refused() {
        for precision in [Precision::F32, Precision::Bf16] {
            assert_eq!(precision.to_string().parse::<Precision>().expect("its own name"), precision);
        }
        let refused = "f16".parse::<Precision>().expect_err("no type of models").to_string();
        assert!(refused.contains("'f16'") && refused.contains("f32, bf16"), "{refused}");
    }
}
