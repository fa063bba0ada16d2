//! Tensors on the device of a rank's kernel.

#[cfg(feature = "cuda")]
use super::cuda::{BorrowedSlice, Gpu, GpuArray, GpuElement};
use super::device::Device;
use super::{Data, Floats, Kernel, View};
use crate::error::Result;
use std::borrow::Cow;

/// A tensor on the kernel's device: the given one if it is there, else a copy.
#[derive(Debug)]
pub struct DeviceTensor<'a> {
    given: View<'a>,
    #[cfg(feature = "cuda")]
    copy: Option<GpuArray>,
}

impl DeviceTensor<'_> {
    /// The tensor, with the strides of the given one.
    pub fn view(&self) -> View<'_> {
        #[cfg(feature = "cuda")]
        if let Some(copy) = &self.copy {
            return View { data: Data::Gpu(copy.data()), ..self.given };
        }
        self.given
    }
}

impl Kernel {
    /// Brings a tensor to this kernel's device: copies it, unless it is there.
    ///
    /// # Errors
    /// A tensor on a GPU for a kernel on the CPU; failures of the device.
    pub fn hold<'a>(&self, view: View<'a>) -> Result<DeviceTensor<'a>> {
        match &self.0 {
            Device::Cpu(_) => {
                self.check_place([&view])?;
                Ok(DeviceTensor {
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
                Ok(DeviceTensor { given: view, copy })
            }
        }
    }

    /// Brings numbers to the memory of the CPU: copies them, unless they are there.
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

    /// Reads f32 numbers on the CPU, wherever they are.
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

    /// Whether this kernel computes on the CPU.
    pub fn is_cpu(&self) -> bool {
        match &self.0 {
            Device::Cpu(_) => true,
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => false,
        }
    }

    /// The GPU of this kernel; `None` if it computes on the CPU.
    #[cfg(feature = "cuda")]
    pub fn gpu(&self) -> Option<&Gpu> {
        match &self.0 {
            Device::Cpu(_) => None,
            Device::Cuda(cuda) => Some(cuda.gpu()),
        }
    }

    /// Borrows a slice that another library (cudarc, candle) holds on this GPU. Nothing is copied, and the CPU does not
    /// wait: work that was started before on the slice's stream precedes the reads of this kernel, and work that is started
    /// there after the loan follows them.
    ///
    /// # Errors
    /// A kernel on the CPU or another GPU; failures of the driver.
    #[cfg(feature = "cuda")]
    pub fn borrow<'a, T: GpuElement>(&self, slice: &'a cudarc::driver::CudaSlice<T>) -> Result<BorrowedSlice<'a>> {
        self.on_gpu()?.borrow(slice)
    }
}
