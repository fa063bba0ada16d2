//! The inputs of a call, on the device of the group's kernel.

use super::Inputs;
use crate::error::Result;
use crate::kernel::{DeviceTensor, Kernel, Score};

/// Inputs on the kernel's device: borrowed if they were there, copied if not.
pub(super) struct DeviceInputs<'a> {
    q: DeviceTensor<'a>,
    k: DeviceTensor<'a>,
    v: DeviceTensor<'a>,
    bias: Option<DeviceTensor<'a>>,
    score: &'a Score,
}

impl<'a> Inputs<'a> {
    pub(super) fn to_device(self, kernel: &Kernel) -> Result<DeviceInputs<'a>> {
        let Self { q, k, v, score, bias } = self;
        let bias = bias.map(|bias| kernel.to_device(bias)).transpose()?;
        Ok(DeviceInputs { q: kernel.to_device(q)?, k: kernel.to_device(k)?, v: kernel.to_device(v)?, bias, score })
    }
}

impl DeviceInputs<'_> {
    pub(super) fn inputs(&self) -> Inputs<'_> {
        let Self { q, k, v, bias, score } = self;
        Inputs { q: q.view(), k: k.view(), v: v.view(), score, bias: bias.as_ref().map(DeviceTensor::view) }
    }
}
