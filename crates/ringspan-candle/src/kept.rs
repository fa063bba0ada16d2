//! Numbers that wait from a layer's forward pass for its backward, whole or rounded.

use crate::cast::cast;
use crate::number::Number;
use crate::offload::{Away, Offload};
use crate::{gpu, pool, slices};
use candle_core::{DType, Device, Result, Tensor, bail};
use half::bf16;
use std::{fmt, str::FromStr, sync::Arc};

/// The type in which what waits is stored. What is computed with keeps its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Storage {
    /// Nothing is lost.
    #[default]
    F32,
    /// Half the memory; each number is wrong by up to 2^-9 of itself.
    Bf16,
}

impl FromStr for Storage {
    type Err = ringspan::Error;

    fn from_str(given: &str) -> std::result::Result<Self, Self::Err> {
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
    /// Bytes of a number.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// A tensor that waits. Clones share its numbers.
#[derive(Debug, Clone)]
pub struct Kept {
    shape: Vec<usize>,
    /// Of the tensor that was given.
    dtype: DType,
    numbers: Numbers,
}

#[derive(Debug, Clone)]
enum Numbers {
    /// As it was computed: nothing is copied; on a GPU also rounded ones.
    Whole(Tensor),
    Rounded(Arc<Vec<bf16>>),
    /// On the CPU, or on its way there or back.
    Away(Away),
}

impl Kept {
    /// Keeps a contiguous tensor, without its graph: f32, or bf16, which is kept as it is.
    ///
    /// # Errors
    /// Other tensors.
    pub fn new(tensor: &Tensor, storage: Storage) -> Result<Self> {
        let numbers = match storage {
            Storage::F32 => Numbers::Whole(tensor.detach()),
            Storage::Bf16 if tensor.dtype() == DType::BF16 => Numbers::Whole(tensor.detach()),
            Storage::Bf16 if gpu::holds(tensor) => Numbers::Whole(cast(&tensor.detach(), DType::BF16)?),
            Storage::Bf16 => Numbers::Rounded(Arc::new(slices::values(tensor, |values| Ok(rounded(values)))?)),
        };
        Ok(Self { shape: tensor.dims().to_vec(), dtype: tensor.dtype(), numbers })
    }

    /// What was kept, in the type that it was given in.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn tensor(&self) -> Result<Tensor> {
        match &self.numbers {
            Numbers::Whole(tensor) => cast(tensor, self.dtype),
            Numbers::Away(away) => cast(&away.tensor()?, self.dtype),
            Numbers::Rounded(values) => Tensor::from_vec(widened(values), self.shape.as_slice(), &Device::Cpu),
        }
    }

    /// The same, which waits on the CPU if it is on a GPU, and if the layer that `offload` is at sends what it keeps away.
    ///
    /// # Errors
    /// No memory of the CPU that the driver can pin; failures of the device.
    pub fn away(self, offload: &Offload) -> Result<Self> {
        let sent = match &self.numbers {
            Numbers::Whole(tensor) if gpu::holds(tensor) => offload.send(tensor)?,
            _ => None,
        };
        Ok(match sent {
            Some(away) => Self { numbers: Numbers::Away(away), ..self },
            None => self,
        })
    }

    /// Its shape.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.shape
    }
}

impl Kept {
    /// Numbers in it.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The same, if it has this shape.
    pub(crate) fn of(self, shape: &[usize]) -> Result<Self> {
        if self.shape != shape {
            bail!("kept {:?}, and asked for {shape:?}", self.shape);
        }
        Ok(self)
    }

    /// What was kept, of this shape, on the CPU, in f32.
    pub(crate) fn values(self, shape: &[usize]) -> Result<Vec<f32>> {
        let kept = self.of(shape)?;
        match kept.numbers {
            Numbers::Rounded(values) => Ok(widened(&values)),
            Numbers::Whole(tensor) if tensor.dtype() == DType::BF16 => {
                slices::elements_of(&tensor, |values| Ok(widened(values)))
            }
            Numbers::Whole(tensor) => slices::values(&tensor, |values| {
                let mut out = vec![0.0; values.len()];
                copy(values, &mut out);
                Ok(out)
            }),
            Numbers::Away(_) => bail!("asked on the CPU for what a GPU keeps"),
        }
    }
}

/// As it is, on the threads of this pool.
pub(crate) fn copy(values: &[f32], out: &mut [f32]) {
    let part = pool::part(values.len(), 1);
    pool::map(out.chunks_mut(part).zip(values.chunks(part)).collect(), |(out, values): (&mut [f32], &[f32])| {
        out.copy_from_slice(values);
    });
}

/// To the nearest bf16, on the threads of this pool.
pub(crate) fn rounded(values: &[f32]) -> Vec<bf16> {
    let mut out = vec![bf16::ZERO; values.len()];
    round(values, &mut out);
    out
}

/// To the nearest bf16, ties to even, on the threads of this pool.
pub(crate) fn round(values: &[f32], out: &mut [bf16]) {
    let part = pool::part(values.len(), 1);
    pool::map(out.chunks_mut(part).zip(values.chunks(part)).collect(), |(out, values): (&mut [bf16], &[f32])| {
        pool::vectorized(|| out.iter_mut().zip(values).for_each(|(out, x)| *out = nearest(*x)));
    });
}

/// In f32, on the threads of this pool.
pub(crate) fn widened(values: &[bf16]) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    widen(values, &mut out);
    out
}

/// In f32, on the threads of this pool.
pub(crate) fn widen(values: &[bf16], out: &mut [f32]) {
    let part = pool::part(values.len(), 1);
    pool::map(out.chunks_mut(part).zip(values.chunks(part)).collect(), |(out, values): (&mut [f32], &[bf16])| {
        pool::vectorized(|| {
            out.iter_mut().zip(values).for_each(|(out, x)| *out = x.wide());
        });
    });
}

/// Plain arithmetic, so that loops over it vectorise; a NaN stays one.
#[inline(always)]
pub(crate) fn nearest(x: f32) -> bf16 {
    let bits = x.to_bits();
    let up = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let nan = bits >> 16 | 0x40;
    bf16::from_bits(if x.is_nan() { nan as u16 } else { up as u16 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_the_nearest_and_keeps_what_is_no_number() {
        let mut bits = 1u32;
        for _ in 0..1_000_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(bits);
            let (got, wanted) = (nearest(x), bf16::from_f32(x));
            assert!(got == wanted || got.is_nan() && wanted.is_nan(), "{x} ({bits:x}) became {got}, not {wanted}");
        }
        for x in [0.0, -0.0, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MIN_POSITIVE] {
            assert_eq!(nearest(x).to_bits() & 0x7fbf, bf16::from_f32(x).to_bits() & 0x7fbf, "{x}");
        }
    }

    #[test]
    fn what_is_kept_comes_back_in_its_shape() -> Result<()> {
        let tensor = Tensor::new(&[[1.0f32, 2.5, -3.0], [0.1, 1e30, 0.0]], &Device::Cpu)?;
        assert_eq!(Kept::new(&tensor, Storage::F32)?.tensor()?.to_vec2::<f32>()?, tensor.to_vec2::<f32>()?);
        let rounded = Kept::new(&tensor, Storage::Bf16)?.tensor()?.to_vec2::<f32>()?;
        for (rounded, x) in rounded.iter().flatten().zip(tensor.to_vec2::<f32>()?.iter().flatten()) {
            assert!((rounded - x).abs() <= x.abs() / 512.0, "{x} became {rounded}");
        }
        Ok(())
    }

    #[test]
    fn types_are_read_as_they_are_written_and_others_refused() {
        for storage in [Storage::F32, Storage::Bf16] {
            assert_eq!(storage.to_string().parse::<Storage>().expect("its own name"), storage);
        }
        let refused = "f16".parse::<Storage>().err().map(|error| error.to_string()).unwrap_or_default();
        assert!(refused.contains("f16") && refused.contains("f32, bf16"), "{refused}");
    }
}
