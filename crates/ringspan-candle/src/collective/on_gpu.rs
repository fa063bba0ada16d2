//! The same between ranks that are threads, of tensors on GPUs: tensors are handed over as they are. Ranks that share a GPU
//! share candle's stream there, so whoever is handed a tensor reads it behind who computed it.

use crate::cast::cast;
use crate::gpu::{self, given};
use candle_core::{DType, Device, Result, Tensor, bail};
use ringspan::comm::{Buffer, Communicator, OnDevice};
use std::any::Any;
use std::sync::Arc;

type Comm = Arc<dyn Communicator>;

/// A tensor as a message. Nobody writes to it any more.
#[derive(Debug)]
struct Handed(Tensor);

impl OnDevice for Handed {
    fn elements(&self) -> usize {
        self.0.elem_count()
    }

    fn width(&self) -> u64 {
        self.0.dtype().size_in_bytes() as u64
    }
}

/// Whether tensors like x are handed over.
pub(super) fn hands_over(comm: &Comm, x: &Tensor) -> bool {
    gpu::holds(x) && comm.hands_over()
}

pub(super) fn all_gather(comm: &Comm, x: &Tensor, counts: Vec<usize>) -> Result<Tensor> {
    let value = gather(comm, &x.detach())?;
    let comm = comm.clone();
    given(x, value, move |d| scatter(&comm, d, &counts))
}

/// Zeros, if nobody looks at the result.
pub(super) fn reduce_scatter(comm: &Comm, x: &Tensor, counts: &[usize], seen: bool) -> Result<Tensor> {
    let value = match seen {
        true => scatter(comm, &x.detach(), counts)?,
        false => rows_like(x, counts[comm.rank()])?,
    };
    let comm = comm.clone();
    given(x, value, move |d| gather(&comm, d))
}

pub(super) fn all_reduce(comm: &Comm, x: &Tensor) -> Result<Tensor> {
    let value = reduce(comm, &x.detach())?;
    let comm = comm.clone();
    given(x, value, move |d| reduce(&comm, d))
}

/// Zeros, if nobody looks at the result.
pub(super) fn all_to_all(comm: &Comm, x: &Tensor, [send, receive]: [&[usize]; 2], seen: bool) -> Result<Tensor> {
    let value = match seen {
        true => exchange(comm, &x.detach(), send, receive)?,
        false => rows_like(x, receive.iter().sum())?,
    };
    let (comm, send, receive) = (comm.clone(), send.to_vec(), receive.to_vec());
    given(x, value, move |d| exchange(&comm, d, &receive, &send))
}

/// Rows of all ranks.
fn gather(comm: &Comm, x: &Tensor) -> Result<Tensor> {
    let parts = comm.all_gather(message(x.clone())?).map_err(candle_core::Error::wrap)?;
    joined(x, parts.iter().map(|part| taken(part, x)).collect::<Result<_>>()?)
}

/// This rank's rows of the sum, in rank order.
fn scatter(comm: &Comm, x: &Tensor, counts: &[usize]) -> Result<Tensor> {
    let parts = comm.all_to_all(dealt(x, counts)?).map_err(candle_core::Error::wrap)?;
    sum(x, counts[comm.rank()], &parts)
}

/// The sum over the ranks, in rank order.
fn reduce(comm: &Comm, x: &Tensor) -> Result<Tensor> {
    let parts = comm.all_gather(message(x.clone())?).map_err(candle_core::Error::wrap)?;
    sum(x, x.dim(0)?, &parts)
}

fn exchange(comm: &Comm, x: &Tensor, send: &[usize], receive: &[usize]) -> Result<Tensor> {
    let parts = comm.all_to_all(dealt(x, send)?).map_err(candle_core::Error::wrap)?;
    let parts = parts.iter().map(|part| taken(part, x)).collect::<Result<Vec<_>>>()?;
    for (rank, (part, rows)) in parts.iter().zip(receive).enumerate() {
        if part.dim(0)? != *rows {
            bail!("all_to_all: expected {rows} rows of rank {rank}, received {:?}", part.shape());
        }
    }
    joined(x, parts)
}

/// Rows of x behind each other, as messages.
fn dealt(x: &Tensor, counts: &[usize]) -> Result<Vec<Buffer>> {
    let mut from = 0;
    let part = |count: &usize| {
        let rows = x.narrow(0, from, *count)?;
        from += count;
        message(rows)
    };
    counts.iter().map(part).collect()
}

fn message(x: Tensor) -> Result<Buffer> {
    match x.dtype() {
        DType::F32 | DType::BF16 => Ok(Buffer::Device(Arc::new(Handed(x.detach())))),
        other => bail!("collectives move tensors of f32 and bf16, given {other:?}"),
    }
}

/// What another rank handed over, where x is, with rows like those of x.
fn taken(part: &Buffer, x: &Tensor) -> Result<Tensor> {
    let Buffer::Device(elements) = part else { bail!("another rank sent what lies on no GPU") };
    let Some(Handed(tensor)) = (&**elements as &dyn Any).downcast_ref() else {
        bail!("another rank sent something else than a tensor");
    };
    if tensor.dims().get(1..) != x.dims().get(1..) || tensor.dtype() != x.dtype() {
        let ((theirs, here), shapes) = ((tensor.dtype(), x.dtype()), (tensor.shape(), x.shape()));
        bail!("another rank sent {theirs:?} {:?}, which does not fit {here:?} {:?} here", shapes.0, shapes.1);
    }
    if tensor.device().same_device(x.device()) {
        return Ok(tensor.clone());
    }
    // From another GPU: candle has no copy that knows both. Moving a tensor moves all that it is a part of.
    tensor.force_contiguous()?.to_device(&Device::Cpu)?.to_device(x.device())
}

/// The parts behind each other. Candle starts no kernels for tensors without elements.
fn joined(like: &Tensor, parts: Vec<Tensor>) -> Result<Tensor> {
    let parts: Vec<Tensor> = parts.into_iter().filter(|part| part.elem_count() > 0).collect();
    if parts.is_empty() { rows_like(like, 0) } else { Tensor::cat(&parts, 0) }
}

/// The sum of `rows` rows like those of x: added up in f32, and rounded once.
fn sum(x: &Tensor, rows: usize, parts: &[Arc<Buffer>]) -> Result<Tensor> {
    let mut sum = Tensor::zeros(super::with_rows(x.shape(), rows), DType::F32, x.device())?;
    for part in parts {
        let part = taken(part, x)?;
        if part.shape() != sum.shape() {
            bail!("another rank sent {:?} for a sum of {:?}", part.shape(), sum.shape());
        }
        if sum.elem_count() > 0 {
            sum = (sum + cast(&part, DType::F32)?)?;
        }
    }
    cast(&sum, x.dtype())
}

/// Zeros with rows like those of x.
fn rows_like(x: &Tensor, rows: usize) -> Result<Tensor> {
    Tensor::zeros(super::with_rows(x.shape(), rows), x.dtype(), x.device())
}
