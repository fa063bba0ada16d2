//! Collectives as candle operations with a backward pass.
//!
//! All ranks of the communicator must call them, and their backward passes, in the same order: build the same graph
//! everywhere. Tensors are sent in their type, f32 or bf16; sums over ranks are computed in f32 and rounded once.
//!
//! Tensors on GPUs are handed over without a copy through CPU memory where ranks are threads, or processes that are connected
//! from GPU to GPU; elsewhere they are copied through CPU memory.

mod on_cpu;
#[cfg_attr(not(feature = "cuda"), path = "collective/without_gpu.rs")]
mod on_gpu;

use crate::device_ops;
use crate::gpu;
use crate::number::{self, with_number};
use crate::tape::{self, Reads};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use on_cpu::message;
use ringspan::comm::{Buffer, Communicator};
use std::sync::Arc;

/// The rows of all ranks in rank order: `[n_r, ..]` on rank r to `[sum of n_r, ..]`. The backward pass is a reduce-scatter.
///
/// # Errors
/// Failures of other ranks, ranks whose rows have other widths.
pub fn all_gather(comm: &Arc<dyn Communicator>, x: &Tensor) -> Result<Tensor> {
    let rows = x.dim(0)? as u64;
    let counts = comm.all_gather(Buffer::U64(vec![rows])).map_err(candle_core::Error::wrap)?;
    let counts = counts.iter().map(|count| match &**count {
        Buffer::U64(count) if count.len() == 1 => Ok(count[0] as usize),
        _ => bail!("all_gather: another rank sent something else than a count of rows"),
    });
    all_gather_of(comm, x, counts.collect::<Result<_>>()?)
}

/// Like [`all_gather`], where all ranks know already how many rows each rank has.
///
/// # Errors
/// A number of rows other than `counts` says, failures of other ranks.
pub fn all_gather_of(comm: &Arc<dyn Communicator>, x: &Tensor, counts: Vec<usize>) -> Result<Tensor> {
    let (rank, rows) = (comm.rank(), x.dim(0)?);
    if counts.len() != comm.size() || counts[rank] != rows {
        bail!("all_gather of {counts:?} rows: rank {rank} of {} has {rows}", comm.size());
    }
    if passes_device_memory(comm, x) {
        return on_gpu::all_gather(comm, x, counts);
    }
    device_ops::on_host(x, AllGather { comm: comm.clone(), counts })
}

/// All-gathers columns of several matrices by one exchange: this rank has `[T, n]` of each, and gets the columns of all ranks side by
/// side, `[T, sum of n]`; `columns` says how many of each matrix a rank has. The matrices are on the CPU, and results have no gradients.
///
/// # Errors
/// Other types than f32 and bf16, matrices of other numbers of columns, failures of other ranks.
pub(crate) fn all_gather_columns(
    comm: &dyn Communicator,
    own: &[Tensor],
    columns: &dyn Fn(usize) -> Vec<usize>,
) -> Result<Vec<Tensor>> {
    let Some(dtype) = own.first().map(Tensor::dtype) else { return Ok(Vec::new()) };
    let rows = own[0].dim(0)?;
    let expected = columns(comm.rank());
    for (matrix, columns) in own.iter().zip(&expected) {
        if matrix.dims() != [rows, *columns] || matrix.dtype() != dtype || own.len() != expected.len() {
            bail!("rank {} gives {matrix:?} of matrices of {rows} rows and {expected:?} columns", comm.rank());
        }
    }
    with_number!(dtype, T => on_cpu::gather_columns::<T>(comm, own, rows, columns))
}

/// Sums x over the ranks and distributes the rows of the sum: `[sum of n_r, ..]` to `[n_r, ..]`, where rank r receives
/// `counts[r]` rows. The backward pass is an all-gather.
///
/// # Errors
/// Counts that do not add up, failures of other ranks.
pub fn reduce_scatter(comm: &Arc<dyn Communicator>, x: &Tensor, counts: Vec<usize>) -> Result<Tensor> {
    scattered(comm, x, counts, true)
}

/// Like [`reduce_scatter`], where nothing reads the result: it is zeros and nothing is sent, but the backward pass is that of
/// a reduce-scatter.
pub(crate) fn reduce_scatter_unused(comm: &Arc<dyn Communicator>, x: &Tensor, counts: Vec<usize>) -> Result<Tensor> {
    scattered(comm, x, counts, false)
}

fn scattered(comm: &Arc<dyn Communicator>, x: &Tensor, counts: Vec<usize>, needs_values: bool) -> Result<Tensor> {
    let rows = x.dim(0)?;
    if counts.len() != comm.size() || counts.iter().sum::<usize>() != rows {
        bail!("reduce_scatter over {} ranks of {rows} rows cannot give them {counts:?}", comm.size());
    }
    if passes_device_memory(comm, x) {
        return on_gpu::reduce_scatter(comm, x, &counts, needs_values);
    }
    let op = ReduceScatter { comm: comm.clone(), counts, needs_values: needs_values && !tape::is_unused(x) };
    if tape::is_unused(x) {
        let shape = [&[op.counts[comm.rank()]], &x.dims()[1..]].concat();
        return tape::apply_unused(op, [x], Reads::Nothing, (shape, x.dtype()));
    }
    device_ops::on_host(x, op)
}

/// The sum of x over the ranks, equal on each. The backward pass sums the gradients over the ranks.
///
/// # Errors
/// Failures of other ranks, ranks with other shapes.
pub fn all_reduce(comm: &Arc<dyn Communicator>, x: &Tensor) -> Result<Tensor> {
    if passes_device_memory(comm, x) {
        return on_gpu::all_reduce(comm, x);
    }
    device_ops::on_host(x, AllReduce { comm: comm.clone() })
}

/// Sends `send[r]` rows to each rank r, in order; returns the rows that this rank received, in rank order, `receive[r]` from
/// rank r. The backward pass is the exchange in the other direction.
///
/// # Errors
/// Counts that do not add up, failures of other ranks.
pub fn all_to_all(comm: &Arc<dyn Communicator>, x: &Tensor, send: &[usize], receive: &[usize]) -> Result<Tensor> {
    exchanged(comm, x, [send, receive], true)
}

/// Like [`all_to_all`], where nothing reads the result: it is zeros and nothing is sent, but the backward pass is that of an
/// all-to-all.
pub(crate) fn all_to_all_unused(
    comm: &Arc<dyn Communicator>,
    x: &Tensor,
    send: &[usize],
    receive: &[usize],
) -> Result<Tensor> {
    exchanged(comm, x, [send, receive], false)
}

fn exchanged(comm: &Arc<dyn Communicator>, x: &Tensor, counts: [&[usize]; 2], needs_values: bool) -> Result<Tensor> {
    let [send, receive] = counts;
    let rows = x.dim(0)?;
    if send.len() != comm.size() || receive.len() != comm.size() || send.iter().sum::<usize>() != rows {
        bail!("all_to_all over {} ranks of {rows} rows cannot send {send:?} and receive {receive:?}", comm.size());
    }
    if passes_device_memory(comm, x) {
        return on_gpu::all_to_all(comm, x, counts, needs_values);
    }
    let op = AllToAll { comm: comm.clone(), send: send.to_vec(), receive: receive.to_vec(), needs_values };
    device_ops::on_host(x, op)
}

/// Whether tensors on the device of x are handed over from GPU to GPU.
fn passes_device_memory(comm: &Arc<dyn Communicator>, x: &Tensor) -> bool {
    gpu::holds(x) && comm.passes_device_memory()
}

struct AllGather {
    comm: Arc<dyn Communicator>,
    counts: Vec<usize>,
}

impl CustomOp1 for AllGather {
    fn name(&self) -> &'static str {
        "all-gather"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let all = on_cpu::gather(&*self.comm, message(storage, layout)?)?;
        let expected: usize = elements(layout.dims(), &self.counts).iter().sum();
        if on_cpu::count(&all) != expected {
            bail!("all_gather: expected {expected} elements of all ranks, received {}", on_cpu::count(&all));
        }
        Ok((all, with_rows(layout.shape(), self.counts.iter().sum())))
    }

    fn bwd(&self, x: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        on_cpu::made(x, gradient, |d| on_cpu::scatter(&*self.comm, d, &elements(x.dims(), &self.counts)))
    }
}

struct ReduceScatter {
    comm: Arc<dyn Communicator>,
    counts: Vec<usize>,
    needs_values: bool,
}

impl CustomOp1 for ReduceScatter {
    fn name(&self) -> &'static str {
        "reduce-scatter"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let counts = elements(layout.dims(), &self.counts);
        let own = match self.needs_values {
            true => on_cpu::scatter(&*self.comm, message(storage, layout)?, &counts)?,
            false => number::storage(vec![0.0; counts[self.comm.rank()]], storage.dtype())?,
        };
        Ok((own, with_rows(layout.shape(), self.counts[self.comm.rank()])))
    }

    fn bwd(&self, x: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        on_cpu::made(x, gradient, |d| on_cpu::gather(&*self.comm, d))
    }
}

struct AllReduce {
    comm: Arc<dyn Communicator>,
}

impl CustomOp1 for AllReduce {
    fn name(&self) -> &'static str {
        "all-reduce"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((on_cpu::reduce(&*self.comm, message(storage, layout)?)?, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        on_cpu::made(x, gradient, |d| on_cpu::reduce(&*self.comm, d))
    }
}

struct AllToAll {
    comm: Arc<dyn Communicator>,
    send: Vec<usize>,
    receive: Vec<usize>,
    needs_values: bool,
}

impl CustomOp1 for AllToAll {
    fn name(&self) -> &'static str {
        "all-to-all"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let width: usize = layout.dims()[1..].iter().product();
        let rows: usize = self.receive.iter().sum();
        let (received, count) = match self.needs_values {
            true => {
                let received =
                    on_cpu::exchange(&*self.comm, message(storage, layout)?, &elements(layout.dims(), &self.send))?;
                let count = on_cpu::count(&received);
                (received, count)
            }
            false => (number::storage(vec![0.0; rows * width], storage.dtype())?, rows * width),
        };
        if count != rows * width {
            bail!("all_to_all: expected {rows} rows of {width}, received {count} elements");
        }
        Ok((received, with_rows(layout.shape(), rows)))
    }

    fn bwd(&self, x: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let counts = elements(x.dims(), &self.receive);
        on_cpu::made(x, gradient, |d| on_cpu::exchange(&*self.comm, d, &counts))
    }
}

/// The number of elements in each of these numbers of rows, in a tensor of these dims.
fn elements(dims: &[usize], rows: &[usize]) -> Vec<usize> {
    let width: usize = dims[1..].iter().product();
    rows.iter().map(|rows| rows * width).collect()
}

fn with_rows(shape: &Shape, rows: usize) -> Shape {
    let mut dims = shape.dims().to_vec();
    if let Some(first) = dims.first_mut() {
        *first = rows;
    }
    Shape::from(dims)
}
