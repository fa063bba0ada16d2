//! Tensors on the device of a rank's kernel.

use super::backend::Backend;
use super::device::Device;
use super::device_array::DeviceArray;
use super::{Data, Floats, Kernel, View};
use crate::error::Result;
use std::borrow::Cow;

/// A tensor on the kernel's device: the given one if it is there, else a copy.
#[derive(Debug)]
pub struct DeviceTensor<'a> {
    given: View<'a>,
    copy: Option<DeviceArray>,
}

impl<'a> DeviceTensor<'a> {
    /// A tensor on the device of `backend`.
    pub(super) fn on(backend: &dyn Backend, view: View<'a>) -> Result<Self> {
        view.check_in_order(backend)?;
        let copy = match view.data {
            Data::Device(data) if backend.holds(data.memory()) => None,
            Data::Device(data) => Some(backend.copy(data)?),
            data => Some(backend.upload(data)?),
        };
        Ok(Self { given: view, copy })
    }

    /// The tensor, with the strides of the given one.
    pub fn view(&self) -> View<'_> {
        if let Some(copy) = &self.copy {
            return View { data: Data::Device(copy.data()), ..self.given };
        }
        self.given
    }
}

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
                Ok(DeviceTensor { given: view, copy: None })
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

    /// Whether this kernel computes on the CPU.
    pub fn is_cpu(&self) -> bool {
        match &self.0 {
            Device::Cpu(_) => true,
            Device::Backend(_) => false,
        }
    }
}
