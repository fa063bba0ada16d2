//! Activations that are stored from a layer's forward pass for its backward pass, in full precision or rounded to bf16.

use crate::cast::cast;
use crate::offload::{Offload, OffloadedActivation};
use crate::rounding::{copy, rounded, widened};
use crate::{gpu, slices};

use candle_core::{DType, Device, Result, Tensor, bail};
use half::bf16;
use std::sync::Arc;

pub use crate::activation_storage::Storage;

/// An activation that is stored until the backward pass. Clones share its memory.
#[derive(Debug, Clone)]
pub struct StoredActivation {
    shape: Vec<usize>,
    /// The type of the tensor that was stored, which [`tensor`](Self::tensor) returns again.
    dtype: DType,
    numbers: ActivationValues,
}

#[derive(Debug, Clone)]
enum ActivationValues {
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
            Storage::F32 => ActivationValues::Whole(tensor.detach()),
            Storage::Bf16 if tensor.dtype() == DType::BF16 => ActivationValues::Whole(tensor.detach()),
            Storage::Bf16 if gpu::holds(tensor) => ActivationValues::Whole(cast(&tensor.detach(), DType::BF16)?),
            Storage::Bf16 => ActivationValues::Rounded(Arc::new(slices::values(tensor, |values| Ok(rounded(values)))?)),
        };
        Ok(Self { shape: tensor.dims().to_vec(), dtype: tensor.dtype(), numbers })
    }

    /// The stored activation, in the type of the tensor that was stored.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn tensor(&self) -> Result<Tensor> {
        match &self.numbers {
            ActivationValues::Whole(tensor) => cast(tensor, self.dtype),
            ActivationValues::OffloadedActivation(away) => cast(&away.tensor()?, self.dtype),
            ActivationValues::Rounded(values) => Tensor::from_vec(widened(values), self.shape.as_slice(), &Device::Cpu),
        }
    }

    /// Offloads the stored tensor to CPU memory if it is on a GPU and `offload` sends away the activations of the layer that
    /// is being computed.
    ///
    /// # Errors
    /// No CPU memory that the driver can pin; failures of the device.
    pub fn offload(self, offload: &Offload) -> Result<Self> {
        let sent = match &self.numbers {
            ActivationValues::Whole(tensor) if gpu::holds(tensor) => offload.send(tensor)?,
            _ => None,
        };
        Ok(match sent {
            Some(away) => Self { numbers: ActivationValues::OffloadedActivation(away), ..self },
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
            bail!("an activation of the shape {:?} was stored, but {shape:?} is requested", self.shape);
        }
        Ok(self)
    }

    /// The stored values in f32 on the CPU, of this shape.
    pub(crate) fn values(self, shape: &[usize]) -> Result<Vec<f32>> {
        let stored = self.of(shape)?;
        match stored.numbers {
            ActivationValues::Rounded(values) => Ok(widened(&values)),
            ActivationValues::Whole(tensor) if tensor.dtype() == DType::BF16 => {
                slices::elements_of(&tensor, |values| Ok(widened(values)))
            }
            ActivationValues::Whole(tensor) => slices::values(&tensor, |values| {
                let mut out = vec![0.0; values.len()];
                copy(values, &mut out);
                Ok(out)
            }),
            ActivationValues::OffloadedActivation(_) => bail!("an offloaded activation cannot be read on the CPU"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_activation_comes_back_in_its_shape() -> Result<()> {
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
