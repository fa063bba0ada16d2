//! Replaces `ringspan-cuda` in a build without the feature `cuda`, with the types and functions that other files use.
//! These types have no values, since no GPU can be opened.

use candle_core::{CudaDevice, CudaStorage, bail};
use ringspan::comm::process_group::ProcessGroup;
use ringspan::kernel::{DeviceArray, DeviceSlice};
use ringspan::{Error, Kernel, Result};
use std::convert::Infallible;
use std::marker::PhantomData;
use std::time::Duration;

/// Has no values.
#[derive(Debug, Clone)]
pub(crate) enum Gpu {}

/// Has no values.
pub(crate) struct BorrowedSlice<'a>(Infallible, PhantomData<&'a ()>);

impl Gpu {
    pub(crate) fn count() -> Result<usize> {
        Err(absent())
    }

    pub(crate) fn open(_: usize) -> Result<Self> {
        Err(absent())
    }

    pub(crate) fn of(_: &Kernel) -> Option<&Self> {
        None
    }

    pub(crate) fn kernel(&self) -> Result<Kernel> {
        match *self {}
    }

    pub(crate) fn connect(&self, _: &ProcessGroup, _: Duration) -> Result<(ProcessGroup, Option<String>)> {
        match *self {}
    }

    pub(crate) fn id(&self) -> Result<[u8; 16]> {
        match *self {}
    }

    pub(crate) fn peak_used(&self) -> Result<u64> {
        match *self {}
    }
}

impl BorrowedSlice<'_> {
    pub(crate) fn data(&self) -> DeviceSlice<'_> {
        match self.0 {}
    }
}

fn absent() -> Error {
    Error::Device {
        device: "cuda".into(),
        operation: "open",
        message:
            "this program computes models on CPUs; one that computes them on NVIDIA GPUs, too, is built with `cargo \
                  build --release --features candle-cuda`, where CUDA is installed"
                .into(),
    }
}

pub(crate) fn borrow<'a>(gpu: &Gpu, _: &'a CudaStorage) -> candle_core::Result<BorrowedSlice<'a>> {
    match *gpu {}
}

pub(crate) fn copied(array: &DeviceArray, _: &CudaDevice) -> candle_core::Result<CudaStorage> {
    bail!("{array:?} in a program that was built without GPUs")
}

pub(crate) fn memory(gpu: &Gpu) -> Result<[u64; 2]> {
    match *gpu {}
}
