//! Collectives of tensors on GPUs, in a program that was built without GPUs.

use candle_core::{Result, Tensor, bail};
use ringspan::comm::Communicator;
use std::sync::Arc;

type Comm = Arc<dyn Communicator>;

pub(super) fn all_gather(_: &Comm, _: &Tensor, _: Vec<usize>) -> Result<Tensor> {
    bail!("this program was built without GPUs")
}

pub(super) fn reduce_scatter(_: &Comm, _: &Tensor, _: &[usize], _: bool) -> Result<Tensor> {
    bail!("this program was built without GPUs")
}

pub(super) fn all_reduce(_: &Comm, _: &Tensor) -> Result<Tensor> {
    bail!("this program was built without GPUs")
}

pub(super) fn all_to_all(_: &Comm, _: &Tensor, _: [&[usize]; 2], _: bool) -> Result<Tensor> {
    bail!("this program was built without GPUs")
}
