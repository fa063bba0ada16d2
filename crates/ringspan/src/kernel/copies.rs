//! Copies of tensors between the memory of the CPU and that of a kernel's device.

use super::device::Device;
use super::{Data, DeviceTensor, Floats, Kernel, Statistics, View};
use crate::error::Result;
use std::borrow::Cow;

impl Kernel {
    /// Brings a tensor to this kernel's device: copies it, unless it is there.
    ///
    /// # Errors
    /// A tensor on another device for a kernel on the CPU; a tensor with a table of rows for a kernel on another device; failures
    /// of the device.
    pub fn to_device<'a>(&self, view: View<'a>) -> Result<DeviceTensor<'a>> {
        match &self.0 {
            Device::Cpu(_) => {
                self.check_device([&view])?;
                Ok(DeviceTensor::in_place(view))
            }
            Device::Backend(backend) => DeviceTensor::on(&**backend, view),
        }
    }

    /// Brings numbers to the memory of the CPU: copies them, unless they are there.
    ///
    /// # Errors
    /// Failures of the device, also of what was started before.
    pub fn to_host(&self, values: Floats) -> Result<Vec<f32>> {
        match values {
            Floats::Host(values) => Ok(values),
            Floats::Device(array) => {
                let mut values = vec![0.0; array.len()];
                self.on_device()?.download(array.data(), bytemuck::cast_slice_mut(&mut values))?;
                Ok(values)
            }
        }
    }

    /// Reads f32 numbers on the CPU, wherever they are.
    pub(crate) fn read_floats<'a>(&self, values: Data<'a>) -> Result<Cow<'a, [f32]>> {
        match values {
            Data::Device(data) => {
                let mut values = vec![0.0; data.len()];
                self.on_device()?.download(data, bytemuck::cast_slice_mut(&mut values))?;
                Ok(Cow::Owned(values))
            }
            values => Ok(values.to_f32()),
        }
    }
}

impl Statistics<Floats> {
    /// Copies the statistics to the memory of the CPU.
    ///
    /// # Errors
    /// Failures of the kernel's device.
    pub fn to_host(self, kernel: &Kernel) -> Result<Statistics> {
        Ok(Statistics { max: kernel.to_host(self.max)?, sum: kernel.to_host(self.sum)? })
    }
}
