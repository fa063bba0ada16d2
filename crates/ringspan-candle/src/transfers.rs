//! Parameters on their way to where a rank computes, and gradients on their way back, while it computes.
//!
//! Parameters, sums of gradients and the optimiser are in the memory of the CPU. A GPU copies a unit's parameters while it
//! computes the unit before, and a unit's gradients while it computes those of the next, from and to pinned memory, on a
//! stream for each direction. Where the CPU computes, nothing moves.

#[cfg(feature = "cuda")]
mod on_gpu;

use crate::cast::cast;
use crate::device::RankDevice;
use crate::number::{Number, convert, with_number};
use crate::precision::Precision;
use crate::slices;
use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use std::collections::BTreeMap;
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// A rank's way between the CPU and where it computes.
pub struct Transfers {
    /// In which type parameters are computed with.
    device: RankDevice,
    #[cfg(feature = "cuda")]
    gpu: Option<Arc<on_gpu::Lane>>,
}

/// Memory for the parameters of a unit, of a GPU on which they come later.
#[derive(Default)]
pub struct Reserved {
    #[cfg(feature = "cuda")]
    gpu: Option<on_gpu::Reserved>,
}

/// A parameter as it is put together: its parts, end to end, and its shape.
pub struct Parameter<'a> {
    /// f32, as many as the shape says in all.
    pub parts: Vec<&'a [f32]>,
    /// Of the whole.
    pub shape: Shape,
}

impl Parameter<'_> {
    fn len(&self) -> usize {
        self.parts.iter().map(|part| part.len()).sum()
    }

    /// In the type in which it is computed with, rounded while it is put together.
    fn on_cpu(&self, precision: Precision) -> Result<Tensor> {
        with_number!(precision.dtype(), T => {
            let mut values = vec![T::ZERO; self.len()];
            let mut rest = &mut values[..];
            for part in &self.parts {
                let (to, later) = rest.split_at_mut(part.len());
                convert(part, to);
                rest = later;
            }
            Ok(Var::from_vec(values, self.shape.clone(), &Device::Cpu)?.into_inner())
        })
    }
}

impl Transfers {
    /// To and from where this rank computes.
    ///
    /// # Errors
    /// A driver that gives no stream.
    pub fn new(device: &RankDevice) -> ringspan::Result<Self> {
        #[cfg(feature = "cuda")]
        {
            let lane = match device.tensors() {
                Device::Cuda(gpu) => {
                    Some(Arc::new(on_gpu::Lane::new(gpu).map_err(|error| ringspan::Error::Device {
                        device: format!("{gpu:?}"),
                        operation: "move parameters",
                        message: error.to_string(),
                    })?))
                }
                _ => None,
            };
            Ok(Self { device: device.clone(), gpu: lane })
        }
        #[cfg(not(feature = "cuda"))]
        {
            Ok(Self { device: device.clone() })
        }
    }

    /// The type in which parameters are computed with.
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.device.precision()
    }

    /// Takes memory for parameters of so many numbers, which come while what is started after this is computed.
    ///
    /// # Errors
    /// A GPU without this memory.
    pub fn reserve(&self, sizes: &[usize]) -> Result<Reserved> {
        #[cfg(feature = "cuda")]
        if let Some(lane) = &self.gpu {
            return Ok(Reserved { gpu: Some(lane.reserve(sizes, self.device.precision())?) });
        }
        let _ = sizes;
        Ok(Reserved::default())
    }

    /// The parameters where the rank computes, in the type in which it does, as variables: who differentiates in one need not
    /// copy it. What is started there after this comes behind them. `reserved` is for their sizes, or empty.
    ///
    /// # Errors
    /// A GPU, or a CPU, without memory for them; parts that are no whole.
    pub fn upload(&self, reserved: Reserved, parameters: &[Parameter<'_>]) -> Result<Vec<Tensor>> {
        if let Some(wrong) = parameters.iter().find(|parameter| parameter.len() != parameter.shape.elem_count()) {
            candle_core::bail!("{} numbers for a parameter of shape {:?}", wrong.len(), wrong.shape);
        }
        #[cfg(feature = "cuda")]
        if let Some(lane) = &self.gpu {
            return lane.upload(reserved.gpu, parameters, self.device.precision());
        }
        let _ = reserved;
        parameters.iter().map(|parameter| parameter.on_cpu(self.device.precision())).collect()
    }

    /// Starts to bring gradients to the CPU.
    ///
    /// # Errors
    /// A CPU without memory for them; other types than f32 and bf16.
    pub fn download(&self, gradients: BTreeMap<String, Tensor>) -> Result<Download> {
        #[cfg(feature = "cuda")]
        if let Some(lane) = &self.gpu {
            return Ok(Download { here: BTreeMap::new(), coming: Some(lane.download(gradients)?) });
        }
        Ok(Download {
            here: gradients,
            #[cfg(feature = "cuda")]
            coming: None,
        })
    }
}

/// Gradients on their way to the CPU, or there.
pub struct Download {
    here: BTreeMap<String, Tensor>,
    #[cfg(feature = "cuda")]
    coming: Option<on_gpu::Coming>,
}

impl Download {
    /// Whether nobody has to wait for them. The same for all of a rank's gradients.
    #[must_use]
    pub fn is_here(&self) -> bool {
        #[cfg(feature = "cuda")]
        if self.coming.is_some() {
            return false;
        }
        true
    }

    /// Takes the gradient of this name, if there is one, and calls `f` with its shape and its numbers in f32: waits for it.
    ///
    /// # Errors
    /// Failures of what was started; other types.
    pub fn take<T>(&mut self, name: &str, f: impl FnOnce(&[usize], &[f32]) -> T) -> Result<Option<T>> {
        #[cfg(feature = "cuda")]
        if let Some(coming) = &mut self.coming {
            return coming.take(name, f);
        }
        let Some(gradient) = self.here.remove(name) else { return Ok(None) };
        let gradient = cast(&gradient.contiguous()?, DType::F32)?;
        slices::values(&gradient, |values| Ok(f(gradient.dims(), values))).map(Some)
    }

    /// A name that nobody has taken.
    #[must_use]
    pub fn rest(&self) -> Option<&str> {
        #[cfg(feature = "cuda")]
        if let Some(coming) = &self.coming {
            return coming.rest();
        }
        self.here.keys().next().map(String::as_str)
    }
}
