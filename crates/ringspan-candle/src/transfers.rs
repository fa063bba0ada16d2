//! Transfers parameters to the device of a rank and gradients back to the CPU, while the rank computes.
//!
//! Parameters, gradient sums and optimizer states are in CPU memory. A GPU copies the parameters of a unit while it computes
//! the unit before, and the gradients of a unit while it computes those of the next; it uses pinned memory and a stream for
//! each direction. For a rank that computes on the CPU, nothing is copied.

#[cfg_attr(not(feature = "cuda"), path = "transfers/without_gpu.rs")]
mod on_gpu;

use crate::cast::cast;
use crate::device::RankDevice;
use crate::number::{Number, convert, with_number};
use crate::precision::Precision;
use crate::slices;
use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The transfers between the CPU and the device of one rank.
pub struct Transfers {
    /// The device, which also says the type in which parameters are used.
    device: RankDevice,
    gpu: Option<Arc<on_gpu::CopyStreams>>,
}

/// Memory for the parameters of a unit, on a GPU to which they will be copied.
#[derive(Default)]
pub struct ReservedMemory {
    gpu: Option<on_gpu::ReservedMemory>,
}

/// A whole parameter in CPU memory, as consecutive parts and its shape.
pub struct Parameter<'a> {
    /// The parts, f32; their lengths add up to the number of elements.
    pub parts: Vec<&'a [f32]>,
    /// The shape of the whole parameter.
    pub shape: Shape,
}

impl Parameter<'_> {
    fn len(&self) -> usize {
        self.parts.iter().map(|part| part.len()).sum()
    }

    /// The parameter on the CPU in the type in which it is used, rounded while the parts are concatenated.
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
    /// Transfers to and from the device of this rank.
    ///
    /// # Errors
    /// A GPU on which no stream can be created.
    pub fn new(device: &RankDevice) -> ringspan::Result<Self> {
        let gpu = match device.tensors() {
            Device::Cuda(gpu) => {
                Some(Arc::new(on_gpu::CopyStreams::new(gpu).map_err(|error| ringspan::Error::Device {
                    device: format!("{gpu:?}"),
                    operation: "move parameters",
                    message: error.to_string(),
                })?))
            }
            _ => None,
        };
        Ok(Self { device: device.clone(), gpu })
    }

    /// The type in which parameters are used.
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.device.precision()
    }

    /// Reserves memory for parameters with these numbers of elements, which are copied there later. The copy waits for work
    /// that was started before this call, and not for work that is started after it.
    ///
    /// # Errors
    /// A GPU without this memory.
    pub fn reserve(&self, sizes: &[usize]) -> Result<ReservedMemory> {
        if let Some(lane) = &self.gpu {
            return Ok(ReservedMemory { gpu: Some(lane.reserve(sizes, self.device.precision())?) });
        }
        Ok(ReservedMemory::default())
    }

    /// Copies the parameters to the device of the rank, in the type in which they are used; they are variables, so that
    /// differentiating with respect to one does not copy it. Work that is started on the device after this call waits for the
    /// copies. `reserved` is memory of these sizes, or empty.
    ///
    /// # Errors
    /// A device without memory for them, and parts that do not add up to the shape.
    pub fn upload(&self, reserved: ReservedMemory, parameters: &[Parameter<'_>]) -> Result<Vec<Tensor>> {
        if let Some(wrong) = parameters.iter().find(|parameter| parameter.len() != parameter.shape.elem_count()) {
            candle_core::bail!("{} numbers for a parameter of shape {:?}", wrong.len(), wrong.shape);
        }
        if let Some(lane) = &self.gpu {
            return lane.upload(reserved.gpu, parameters, self.device.precision());
        }
        parameters.iter().map(|parameter| parameter.on_cpu(self.device.precision())).collect()
    }

    /// Starts to copy gradients to the CPU.
    ///
    /// # Errors
    /// A CPU without memory for them; other types than f32 and bf16.
    pub fn download(&self, gradients: BTreeMap<String, Tensor>) -> Result<Download> {
        if let Some(lane) = &self.gpu {
            return Ok(Download { here: BTreeMap::new(), coming: Some(lane.download(gradients)?) });
        }
        Ok(Download { here: gradients, coming: None })
    }
}

/// Gradients that are on the CPU, or being copied there.
pub struct Download {
    here: BTreeMap<String, Tensor>,
    coming: Option<on_gpu::PendingDownload>,
}

impl Download {
    /// Whether the gradients can be taken without waiting. The answer is the same for all gradients of a rank.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.coming.is_none()
    }

    /// Removes the gradient of this name, if there is one, and calls `f` with its shape and its f32 values; waits for its
    /// copy to end.
    ///
    /// # Errors
    /// Failures of a copy, and other types.
    pub fn take<T>(&mut self, name: &str, f: impl FnOnce(&[usize], &[f32]) -> T) -> Result<Option<T>> {
        if let Some(coming) = &mut self.coming {
            return coming.take(name, f);
        }
        let Some(gradient) = self.here.remove(name) else { return Ok(None) };
        let gradient = cast(&gradient.contiguous()?, DType::F32)?;
        slices::values(&gradient, |values| Ok(f(gradient.dims(), values))).map(Some)
    }

    /// The name of a gradient that was not taken; `None` if all were.
    #[must_use]
    pub fn rest(&self) -> Option<&str> {
        if let Some(coming) = &self.coming {
            return coming.rest();
        }
        self.here.keys().next().map(String::as_str)
    }
}
