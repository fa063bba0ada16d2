//! The GPUs of a program that was built without the feature `cuda`: none.

use anyhow::{Result, bail};
use ringspan::Kernel;
use ringspan::comm::process_group::ProcessGroup;

/// Has no values.
pub(crate) enum Gpus {}

impl Gpus {
    pub(crate) fn open(_: Option<usize>, _: &ProcessGroup, _: bool) -> Result<Self> {
        bail!(
            "--device cuda: this program was built without GPUs; build it with `cargo build --release --features cuda`"
        )
    }

    pub(crate) fn kernel(&self, _: usize) -> Result<Kernel> {
        match *self {}
    }

    pub(crate) fn connect(&self, _: &ProcessGroup) -> Result<(ProcessGroup, Option<String>)> {
        match *self {}
    }

    pub(crate) fn names(&self) -> Vec<String> {
        match *self {}
    }
}
