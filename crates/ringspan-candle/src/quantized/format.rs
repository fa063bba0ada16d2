//! The formats of stored weights.

use candle_core::quantized::GgmlDType;
use candle_core::{Result, bail};
use std::fmt::{self, Display, Formatter};

/// A format of stored weights: blocks of a fixed count of numbers in a fixed count of bytes, as ggml lays them out.
///
/// It is displayed by the name that GGUF tools print, such as `Q4_K`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE half precision; a block is one number.
    F16,
    /// bfloat16; a block is one number.
    BF16,
    /// 4 bits for each number, with a scale for each 32.
    Q4_0,
    /// 5 bits for each number, with a scale for each 32.
    Q5_0,
    /// 8 bits for each number, with a scale for each 32.
    Q8_0,
    /// 4 bits for each number, with a scale and a minimum of 6 bits for each 32, and factors of both for each 256.
    Q4K,
    /// 5 bits for each number, with scales and minima as in [`Q4K`](Self::Q4K).
    Q5K,
    /// 6 bits for each number, with a scale of 8 bits for each 16, and a factor for each 256.
    Q6K,
    /// 4 bits for each number, which select one of 16 uneven steps, with a scale for each 32.
    Iq4Nl,
    /// FP4 (E2M1) with a power of two (E8M0) for each 32: the microscaling format of the Open Compute Project.
    Mxfp4,
}

/// The constants of a format.
struct FormatConstants {
    /// The number of the format in GGUF files.
    ggml: u32,
    name: &'static str,
    block_len: usize,
    block_bytes: usize,
    candle: Option<GgmlDType>,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 10] = [
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q5_0,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq4Nl,
        Self::Mxfp4,
    ];

    const fn constants(self) -> FormatConstants {
        let (ggml, name, block_len, block_bytes, candle) = match self {
            Self::F16 => (1, "F16", 1, 2, Some(GgmlDType::F16)),
            Self::BF16 => (30, "BF16", 1, 2, Some(GgmlDType::BF16)),
            Self::Q4_0 => (2, "Q4_0", 32, 18, Some(GgmlDType::Q4_0)),
            Self::Q5_0 => (6, "Q5_0", 32, 22, Some(GgmlDType::Q5_0)),
            Self::Q8_0 => (8, "Q8_0", 32, 34, Some(GgmlDType::Q8_0)),
            Self::Q4K => (12, "Q4_K", 256, 144, Some(GgmlDType::Q4K)),
            Self::Q5K => (13, "Q5_K", 256, 176, Some(GgmlDType::Q5K)),
            Self::Q6K => (14, "Q6_K", 256, 210, Some(GgmlDType::Q6K)),
            Self::Iq4Nl => (20, "IQ4_NL", 32, 18, None),
            Self::Mxfp4 => (39, "MXFP4", 32, 17, None),
        };
        FormatConstants { ggml, name, block_len, block_bytes, candle }
    }

    /// The format with this number in GGUF files; `None` for numbers of other formats.
    #[must_use]
    pub fn from_ggml(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.constants().ggml == number)
    }

    /// The format that candle calls `kind`; `None` for other formats.
    #[must_use]
    pub fn from_candle(kind: GgmlDType) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.constants().candle == Some(kind))
    }

    /// The number of the format in GGUF files.
    #[must_use]
    pub fn ggml(self) -> u32 {
        self.constants().ggml
    }

    /// Candle's name of the format, if it has one.
    #[must_use]
    pub fn candle(self) -> Option<GgmlDType> {
        self.constants().candle
    }

    /// Whether the numbers are integers times scales, which can be multiplied with rounded activations
    /// ([`ActivationDType::Int16`](crate::ActivationDType::Int16)).
    #[must_use]
    pub fn has_codes(self) -> bool {
        self.block_len() > 1
    }

    /// Count of numbers in a block.
    #[must_use]
    pub fn block_len(self) -> usize {
        self.constants().block_len
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        self.constants().block_bytes
    }

    /// Bytes of a matrix of this size.
    ///
    /// # Errors
    /// Rows that are not whole blocks, and a size whose bytes overflow `usize`.
    pub fn bytes(self, rows: usize, columns: usize) -> Result<usize> {
        let FormatConstants { block_len, block_bytes, .. } = self.constants();
        if !columns.is_multiple_of(block_len) {
            bail!("{self} stores blocks of {block_len} numbers, and rows of {columns} columns are not whole blocks");
        }
        match (columns / block_len).checked_mul(block_bytes).and_then(|row| row.checked_mul(rows)) {
            Some(bytes) => Ok(bytes),
            None => bail!("a {self} matrix of {rows} x {columns} takes more bytes than there are addresses"),
        }
    }
}

impl Display for Format {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.pad(self.constants().name)
    }
}
