//! Activations that are stored from a layer's forward pass for its backward pass, in full precision or rounded to bf16.

use crate::cast::cast;
use crate::number::Number;
use crate::offload::{Offload, OffloadedActivation};
use crate::{gpu, pool, slices};
use candle_core::{DType, Device, Result, Tensor, bail};
use half::bf16;
use std::{fmt, str::FromStr, sync::Arc};

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
    /// Bytes of one stored number.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// An activation that is stored until the backward pass. Clones share its memory.
#[derive(Debug, Clone)]
pub struct StoredActivation {
    shape: Vec<usize>,
    /// The type of the tensor that was stored, which [`tensor`](Self::tensor) returns again.
    dtype: DType,
    numbers: Numbers,
}

#[derive(Debug, Clone)]
enum Numbers {
    /// The tensor itself, not a copy; on a GPU, tensors rounded to bf16 are stored this way, too.
    Whole(Tensor),
    Rounded(Arc<Vec<bf16>>),
    /// The tensor was offloaded: it is in CPU memory, or on its way there or back.
    OffloadedActivation(OffloadedActivation),
}

impl StoredActivation {
    /// Stores a contiguous tensor, f32 or bf16, without its graph; one in bf16 is stored as it is, whatever `storage` says.
    ///
    /// # Errors
    /// Tensors of another type.
    pub fn new(tensor: &Tensor, storage: Storage) -> Result<Self> {
        let numbers = match storage {
            Storage::F32 => Numbers::Whole(tensor.detach()),
            Storage::Bf16 if tensor.dtype() == DType::BF16 => Numbers::Whole(tensor.detach()),
            Storage::Bf16 if gpu::holds(tensor) => Numbers::Whole(cast(&tensor.detach(), DType::BF16)?),
            Storage::Bf16 => Numbers::Rounded(Arc::new(slices::values(tensor, |values| Ok(rounded(values)))?)),
        };
        Ok(Self { shape: tensor.dims().to_vec(), dtype: tensor.dtype(), numbers })
    }

    /// The stored activation, in the type of the tensor that was stored.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn tensor(&self) -> Result<Tensor> {
        match &self.numbers {
            Numbers::Whole(tensor) => cast(tensor, self.dtype),
            Numbers::OffloadedActivation(away) => cast(&away.tensor()?, self.dtype),
            Numbers::Rounded(values) => Tensor::from_vec(widened(values), self.shape.as_slice(), &Device::Cpu),
        }
    }

    /// Offloads the stored tensor to CPU memory if it is on a GPU and `offload` sends away the activations of the layer that
    /// is being computed.
    ///
    /// # Errors
    /// No CPU memory that the driver can pin; failures of the device.
    pub fn offload(self, offload: &Offload) -> Result<Self> {
        let sent = match &self.numbers {
            Numbers::Whole(tensor) if gpu::holds(tensor) => offload.send(tensor)?,
            _ => None,
        };
        Ok(match sent {
            Some(away) => Self { numbers: Numbers::OffloadedActivation(away), ..self },
            None => self,
        })
    }

    /// The shape of the stored tensor.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.shape
    }
}

impl StoredActivation {
    /// The number of elements of the stored tensor.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns `self`, or an error if it has another shape.
    pub(crate) fn of(self, shape: &[usize]) -> Result<Self> {
        if self.shape != shape {
            bail!("kept {:?}, and asked for {shape:?}", self.shape);
        }
        Ok(self)
    }

    /// The stored values in f32 on the CPU, of this shape.
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
            Numbers::OffloadedActivation(_) => bail!("asked on the CPU for what a GPU keeps"),
        }
    }
}

/// Copies values on the threads of the current pool.
pub(crate) fn copy(values: &[f32], out: &mut [f32]) {
    let part = pool::part(values.len(), 1);
    pool::map(out.chunks_mut(part).zip(values.chunks(part)).collect(), |(out, values): (&mut [f32], &[f32])| {
        out.copy_from_slice(values);
    });
}

/// Returns the values rounded to the nearest bf16, computed on the threads of the current pool.
pub(crate) fn rounded(values: &[f32]) -> Vec<bf16> {
    let mut out = vec![bf16::ZERO; values.len()];
    round(values, &mut out);
    out
}

/// Rounds values to the nearest bf16, ties to even, on the threads of the current pool.
pub(crate) fn round(values: &[f32], out: &mut [bf16]) {
    let part = pool::part(values.len(), 1);
    pool::map(out.chunks_mut(part).zip(values.chunks(part)).collect(), |(out, values): (&mut [bf16], &[f32])| {
        pool::vectorized(|| out.iter_mut().zip(values).for_each(|(out, x)| *out = nearest(*x)));
    });
}

/// Returns the values in f32, computed on the threads of the current pool.
pub(crate) fn widened(values: &[bf16]) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    widen(values, &mut out);
    out
}

/// Converts values to f32 on the threads of the current pool.
pub(crate) fn widen(values: &[bf16], out: &mut [f32]) {
    let part = pool::part(values.len(), 1);
    pool::map(out.chunks_mut(part).zip(values.chunks(part)).collect(), |(out, values): (&mut [f32], &[bf16])| {
        pool::vectorized(|| {
            out.iter_mut().zip(values).for_each(|(out, x)| *out = x.wide());
        });
    });
}

/// The nearest bf16, ties to even; a NaN stays a NaN. It is integer arithmetic without branches, so that loops over it
/// vectorise.
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
        assert_eq!(StoredActivation::new(&tensor, Storage::F32)?.tensor()?.to_vec2::<f32>()?, tensor.to_vec2::<f32>()?);
        let rounded = StoredActivation::new(&tensor, Storage::Bf16)?.tensor()?.to_vec2::<f32>()?;
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
