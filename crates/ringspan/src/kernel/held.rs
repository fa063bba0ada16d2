//! Tensors where a rank's kernel computes.

#[cfg(feature = "cuda")]
use super::cuda::{Gpu, GpuArray, GpuElement, Lent};
use super::device::Device;
use super::{Data, Floats, Kernel, View};
use crate::error::Result;
use std::borrow::Cow;

/// A tensor that lies where a kernel computes: the given one, or its copy.
#[derive(Debug)]
pub struct Held<'a> {
    given: View<'a>,
    #[cfg(feature = "cuda")]
    copy: Option<GpuArray>,
}

impl Held<'_> {
    /// The tensor, in its strides.
    pub fn view(&self) -> View<'_> {
        #[cfg(feature = "cuda")]
        if let Some(copy) = &self.copy {
            return View { data: Data::Gpu(copy.data()), ..self.given };
        }
        self.given
    }
}

impl Kernel {
    /// The tensor where this kernel computes: copied there, unless it is there.
    ///
    /// # Errors
    /// A tensor on a GPU for a kernel on the CPU; failures of the device.
    pub fn hold<'a>(&self, view: View<'a>) -> Result<Held<'a>> {
        match &self.0 {
            Device::Cpu(_) => {
                self.check_place([&view])?;
                Ok(Held {
                    given: view,
                    #[cfg(feature = "cuda")]
                    copy: None,
                })
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let copy = match view.data {
                    Data::Gpu(data) if data.gpu().is(cuda.gpu()) => None,
                    Data::Gpu(data) => Some(cuda.copied(data)?),
                    data => Some(cuda.upload(data)?),
                };
                Ok(Held { given: view, copy })
            }
        }
    }

    /// Numbers in the memory of the CPU: copied there, unless they are there.
    ///
    /// # Errors
    /// Failures of the device, also of what was started before.
    pub fn to_host(&self, values: Floats) -> Result<Vec<f32>> {
        match values {
            Floats::Host(values) => Ok(values),
            #[cfg(feature = "cuda")]
            Floats::Gpu(array) => {
                let mut values = vec![0.0; array.len()];
                self.on_gpu()?.download(array.data(), &mut values)?;
                Ok(values)
            }
        }
    }

    /// f32 numbers, wherever they are, for the CPU to read.
    pub(crate) fn read_floats<'a>(&self, values: Data<'a>) -> Result<Cow<'a, [f32]>> {
        match values {
            #[cfg(feature = "cuda")]
            Data::Gpu(data) => {
                let mut values = vec![0.0; data.len()];
                self.on_gpu()?.download(data, &mut values)?;
                Ok(Cow::Owned(values))
            }
            values => Ok(values.to_f32()),
        }
    }

    /// The GPU on which this kernel computes; `None` if it is the CPU.
    #[cfg(feature = "cuda")]
    pub fn gpu(&self) -> Option<&Gpu> {
        match &self.0 {
            Device::Cpu(_) => None,
            Device::Cuda(cuda) => Some(cuda.gpu()),
        }
    }

    /// A loan of what another library (cudarc, candle) holds on this GPU. Nothing is copied, and no CPU waits: work that was
    /// started on the slice's stream before comes before what this kernel reads, and work that is started there after the
    /// loan comes behind it.
    ///
    /// # Errors
    /// A kernel on the CPU or another GPU; failures of the driver.
    #[cfg(feature = "cuda")]
    pub fn borrow<'a, T: GpuElement>(&self, slice: &'a cudarc::driver::CudaSlice<T>) -> Result<Lent<'a>> {
        self.on_gpu()?.borrow(slice)
    }
}
