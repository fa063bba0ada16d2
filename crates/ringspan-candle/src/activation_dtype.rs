//! The type of activations in products with quantized weights.

use ringspan::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The type to which activations are rounded where they are multiplied with quantized weights on a CPU.
///
/// Its names in options are `f32` and `int16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ActivationDType {
    /// They are not rounded: products are those with the decoded weight, up to the order of sums.
    #[default]
    F32,
    /// Each 32 activations of a token are rounded to 16-bit integers with a common scale, at most by 2^-16 of the largest of them, and
    /// multiplied by integer instructions, which is faster for several tokens and slower for one. Weights in F16 and BF16 are multiplied in
    /// f32 all the same.
    Int16,
}

impl FromStr for ActivationDType {
    type Err = Error;

    fn from_str(given: &str) -> Result<Self> {
        match given {
            "f32" => Ok(Self::F32),
            "int16" => Ok(Self::Int16),
            _ => Err(Error::Unknown { what: "activation dtype", given: given.into(), possible: "f32, int16" }),
        }
    }
}

impl fmt::Display for ActivationDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::Int16 => "int16",
        })
    }
}
