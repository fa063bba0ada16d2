//! Tensors in the memory of a kernel's device.

use super::backend::Backend;
use super::device_array::DeviceArray;
use super::{Data, View};
use crate::error::{Error, Result};

/// A tensor on the kernel's device: the given one if it is there, else a copy.
#[derive(Debug)]
pub struct DeviceTensor<'a> {
    given: View<'a>,
    copy: Option<DeviceArray>,
}

impl<'a> DeviceTensor<'a> {
    /// A tensor that is on its kernel's device already.
    pub(super) fn in_place(view: View<'a>) -> Self {
        Self { given: view, copy: None }
    }

    /// A tensor on the device of `backend`.
    pub(super) fn on(backend: &dyn Backend, view: View<'a>) -> Result<Self> {
        check_in_order(&view, backend)?;
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

/// Refuses tokens that are in given rows, which no backend reads.
fn check_in_order(view: &View, backend: &dyn Backend) -> Result<()> {
    match view.rows {
        None => Ok(()),
        Some(_) => Err(Error::Device {
            device: format!("{backend:?}"),
            operation: "read a tensor",
            message: format!(
                "its {} tokens are in rows of a table (pages of a cache), which only kernels on the CPU read in place",
                view.tokens
            ),
        }),
    }
}
