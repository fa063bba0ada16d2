//! The collectives for tensors on GPUs that are handed over without a copy through CPU memory: between ranks that are
//! threads, and between processes whose communicator sends from GPU to GPU.

mod message;

use crate::cast::cast;
use crate::gpu::precomputed;
use candle_core::{DType, Result, Tensor, bail};
use message::{check, joined, message, tensor};
use ringspan::comm::{Buffer, Communicator};
use std::sync::Arc;

type Comm = Arc<dyn Communicator>;

pub(super) fn all_gather(comm: &Comm, x: &Tensor, counts: Vec<usize>) -> Result<Tensor> {
    let value = gather(comm, &x.detach(), &counts)?;
    let comm = comm.clone();
    precomputed(x, value, move |d| scatter(&comm, d, &counts))
}

/// As [`super::reduce_scatter`]; unless `needs_values`, the result is zeros and nothing is sent.
pub(super) fn reduce_scatter(comm: &Comm, x: &Tensor, counts: &[usize], needs_values: bool) -> Result<Tensor> {
    let value = match needs_values {
        true => scatter(comm, &x.detach(), counts)?,
        false => rows_like(x, counts[comm.rank()])?,
    };
    let (comm, counts) = (comm.clone(), counts.to_vec());
    precomputed(x, value, move |d| gather(&comm, d, &counts))
}

pub(super) fn all_reduce(comm: &Comm, x: &Tensor) -> Result<Tensor> {
    let value = reduce(comm, &x.detach())?;
    let comm = comm.clone();
    precomputed(x, value, move |d| reduce(&comm, d))
}

/// As [`super::all_to_all`]; unless `needs_values`, the result is zeros and nothing is sent.
pub(super) fn all_to_all(
    comm: &Comm,
    x: &Tensor,
    [send, receive]: [&[usize]; 2],
    needs_values: bool,
) -> Result<Tensor> {
    let value = match needs_values {
        true => exchange(comm, &x.detach(), send, receive)?,
        false => rows_like(x, receive.iter().sum())?,
    };
    let (comm, send, receive) = (comm.clone(), send.to_vec(), receive.to_vec());
    precomputed(x, value, move |d| exchange(&comm, d, &receive, &send))
}

/// The rows of all ranks, `counts[r]` of rank r.
fn gather(comm: &Comm, x: &Tensor, counts: &[usize]) -> Result<Tensor> {
    let parts = comm.all_gather(message(x)?).map_err(candle_core::Error::wrap)?;
    rows(x, &parts, counts)
}

/// This rank's rows of the sum over ranks, which is added in rank order.
fn scatter(comm: &Comm, x: &Tensor, counts: &[usize]) -> Result<Tensor> {
    let parts = comm.all_to_all(split_by_rank(x, counts)?).map_err(candle_core::Error::wrap)?;
    sum(x, counts[comm.rank()], &parts)
}

/// The sum over the ranks, added in rank order.
fn reduce(comm: &Comm, x: &Tensor) -> Result<Tensor> {
    let parts = comm.all_gather(message(x)?).map_err(candle_core::Error::wrap)?;
    sum(x, x.dim(0)?, &parts)
}

fn exchange(comm: &Comm, x: &Tensor, send: &[usize], receive: &[usize]) -> Result<Tensor> {
    let parts = comm.all_to_all(split_by_rank(x, send)?).map_err(candle_core::Error::wrap)?;
    rows(x, &parts, receive)
}

/// Splits the rows of x into consecutive messages of these numbers of rows.
fn split_by_rank(x: &Tensor, counts: &[usize]) -> Result<Vec<Buffer>> {
    let mut from = 0;
    let part = |count: &usize| {
        let rows = x.narrow(0, from, *count)?;
        from += count;
        message(&rows)
    };
    counts.iter().map(part).collect()
}

/// Concatenates the messages of the ranks, which hold rows like those of x, `counts[r]` of rank r.
fn rows(x: &Tensor, parts: &[Arc<Buffer>], counts: &[usize]) -> Result<Tensor> {
    if parts.len() != counts.len() {
        bail!("{} parts of {} ranks", parts.len(), counts.len());
    }
    for (rank, (part, count)) in parts.iter().zip(counts).enumerate() {
        check(part, rank, x, *count)?;
    }
    joined(parts, super::with_rows(x.shape(), counts.iter().sum()), x)
}

/// The sum of the ranks' `rows` rows like those of x, added in f32 and rounded once.
fn sum(x: &Tensor, rows: usize, parts: &[Arc<Buffer>]) -> Result<Tensor> {
    let shape = super::with_rows(x.shape(), rows);
    let mut sum = Tensor::zeros(&shape, DType::F32, x.device())?;
    for (rank, part) in parts.iter().enumerate() {
        check(part, rank, x, rows)?;
        if shape.elem_count() > 0 {
            sum = (sum + cast(&tensor(part, shape.clone(), x)?, DType::F32)?)?;
        }
    }
    cast(&sum, x.dtype())
}

/// Zeros with `rows` rows like those of x.
fn rows_like(x: &Tensor, rows: usize) -> Result<Tensor> {
    Tensor::zeros(super::with_rows(x.shape(), rows), x.dtype(), x.device())
}
