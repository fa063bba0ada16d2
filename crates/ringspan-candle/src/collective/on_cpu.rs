//! The collectives for tensors on the CPU, whose elements are copied into messages; bf16 is sent as 16-bit words.

use crate::cast::cast;
use crate::number::Number;
use crate::rounding::rounded;
use crate::slices::elements_of;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Layout, Result, Storage, Tensor, bail};
use half::bf16;
use half::slice::HalfFloatSliceExt;
use half::vec::HalfBitsVecExt;
use ringspan::comm::{Buffer, Communicator};
use std::sync::Arc;

/// Copies the elements of a tensor into a message.
///
/// # Errors
/// Other types than f32 and bf16, and tensors that are not contiguous.
pub(super) fn message(storage: &CpuStorage, layout: &Layout) -> Result<Buffer> {
    let range = layout.contiguous_offsets().map(|(start, end)| start..end);
    // An empty view may start beyond the end of its storage.
    match (storage, range) {
        (CpuStorage::F32(data), Some(range)) => Ok(Buffer::F32(data.get(range).unwrap_or_default().to_vec())),
        (CpuStorage::BF16(data), Some(range)) => {
            Ok(Buffer::U16(data.get(range).unwrap_or_default().reinterpret_cast().to_vec()))
        }
        _ => bail!("collectives move contiguous tensors of f32 and bf16, given {:?}", layout.shape()),
    }
}

/// The gradient of x that `work` computes from the gradient of a result, which is sent in the type of x.
///
/// # Errors
/// Errors of `work`, and a result whose number of elements differs from that of x.
pub(super) fn made(
    x: &Tensor,
    gradient: &Tensor,
    work: impl FnOnce(Buffer) -> Result<CpuStorage>,
) -> Result<Option<Tensor>> {
    let gradient = cast(&gradient.contiguous()?, x.dtype())?;
    let sent = {
        let (storage, layout) = gradient.storage_and_layout();
        match &*storage {
            Storage::Cpu(storage) => message(storage, layout)?,
            _ => bail!("expected a gradient on the CPU, given one on {:?}", gradient.device()),
        }
    };
    let made = work(sent)?;
    if count(&made) != x.elem_count() {
        bail!("ranks made {} elements of a gradient of {:?}", count(&made), x.shape());
    }
    Ok(Some(Tensor::from_storage(Storage::Cpu(made), x.shape(), BackpropOp::none(), false)))
}

/// All-gather: the elements of all ranks, in rank order.
pub(super) fn gather(comm: &dyn Communicator, own: Buffer) -> Result<CpuStorage> {
    let dtype = dtype(&own)?;
    joined(&comm.all_gather(own).map_err(candle_core::Error::wrap)?, dtype)
}

/// All-gather of columns: the matrices `[rows, n]` of all ranks, each with the columns of all ranks side by side.
pub(super) fn gather_columns<T: Number>(
    comm: &dyn Communicator,
    own: &[Tensor],
    rows: usize,
    columns: &dyn Fn(usize) -> Vec<usize>,
) -> Result<Vec<Tensor>> {
    let mut sent: Vec<T> = Vec::with_capacity(own.iter().map(Tensor::elem_count).sum());
    for matrix in own {
        elements_of::<T, _>(&matrix.contiguous()?, |elements| {
            sent.extend_from_slice(elements);
            Ok(())
        })?;
    }
    let arrived = comm.all_gather(T::into_buffer(sent)).map_err(candle_core::Error::wrap)?;
    let columns: Vec<Vec<usize>> = (0..comm.size()).map(columns).collect();
    // What is left of each rank's message, which has one matrix after the other.
    let mut rest = Vec::with_capacity(arrived.len());
    for (rank, (buffer, columns)) in arrived.iter().zip(&columns).enumerate() {
        let expected = rows * columns.iter().sum::<usize>();
        match T::of_buffer(buffer) {
            Some(elements) if elements.len() == expected => rest.push(elements),
            _ => bail!("rank {rank} sent {} elements of columns instead of {expected} of its own type", buffer.len()),
        }
    }
    let mut whole = Vec::with_capacity(own.len());
    for (index, matrix) in own.iter().enumerate() {
        let mut shares = Vec::with_capacity(rest.len());
        for (rest, columns) in rest.iter_mut().zip(&columns) {
            let (share, behind) = rest.split_at(rows * columns[index]);
            *rest = behind;
            shares.push((share, columns[index]));
        }
        let width: usize = shares.iter().map(|(_, columns)| columns).sum();
        let mut elements: Vec<T> = Vec::with_capacity(rows * width);
        for row in 0..rows {
            for (share, columns) in &shares {
                elements.extend_from_slice(&share[row * columns..(row + 1) * columns]);
            }
        }
        whole.push(Tensor::from_vec(elements, (rows, width), matrix.device())?);
    }
    Ok(whole)
}

/// Reduce-scatter: this rank's elements of the sum over ranks; rank r receives `counts[r]` elements.
pub(super) fn scatter(comm: &dyn Communicator, own: Buffer, counts: &[usize]) -> Result<CpuStorage> {
    match own {
        Buffer::F32(own) => Ok(CpuStorage::F32(comm.reduce_scatter(own, counts).map_err(candle_core::Error::wrap)?)),
        own => sum(&comm.all_to_all(split_by_rank(own, counts)?).map_err(candle_core::Error::wrap)?),
    }
}

/// All-reduce: the sum over ranks.
pub(super) fn reduce(comm: &dyn Communicator, own: Buffer) -> Result<CpuStorage> {
    match own {
        Buffer::F32(mut own) => {
            comm.all_reduce(&mut own).map_err(candle_core::Error::wrap)?;
            Ok(CpuStorage::F32(own))
        }
        own => sum(&comm.all_gather(own).map_err(candle_core::Error::wrap)?),
    }
}

/// All-to-all: sends `counts[r]` elements to rank r, and returns what the ranks sent to this one, in rank order.
pub(super) fn exchange(comm: &dyn Communicator, own: Buffer, counts: &[usize]) -> Result<CpuStorage> {
    let dtype = dtype(&own)?;
    joined(&comm.all_to_all(split_by_rank(own, counts)?).map_err(candle_core::Error::wrap)?, dtype)
}

/// The number of elements of a result.
pub(super) fn count(storage: &CpuStorage) -> usize {
    match storage {
        CpuStorage::BF16(values) => values.len(),
        CpuStorage::F32(values) => values.len(),
        _ => 0,
    }
}

fn dtype(message: &Buffer) -> Result<DType> {
    match message {
        Buffer::F32(_) => Ok(DType::F32),
        Buffer::U16(_) => Ok(DType::BF16),
        _ => bail!("a rank sent something else than f32 or bf16"),
    }
}

/// Splits the elements into consecutive messages of these lengths.
fn split_by_rank(own: Buffer, counts: &[usize]) -> Result<Vec<Buffer>> {
    let mut first = 0;
    let part = |count: &usize| {
        let range = first..first + count;
        first = range.end;
        Ok(match &own {
            Buffer::F32(all) => Buffer::F32(all[range].to_vec()),
            Buffer::U16(all) => Buffer::U16(all[range].to_vec()),
            _ => bail!("a rank sent something else than f32 or bf16"),
        })
    };
    counts.iter().map(part).collect()
}

fn joined(parts: &[Arc<Buffer>], dtype: DType) -> Result<CpuStorage> {
    let (mut wide, mut words) = (Vec::new(), Vec::new());
    for part in parts {
        match (&**part, dtype) {
            (Buffer::F32(part), DType::F32) => wide.extend_from_slice(part),
            (Buffer::U16(part), DType::BF16) => words.extend_from_slice(part),
            _ => bail!("another rank sent something else than {dtype:?}"),
        }
    }
    Ok(if dtype == DType::F32 { CpuStorage::F32(wide) } else { CpuStorage::BF16(words.reinterpret_into()) })
}

/// The sum of equally many bf16 words from each rank, added in f32 in rank order and rounded once.
fn sum(parts: &[Arc<Buffer>]) -> Result<CpuStorage> {
    let mut sums = vec![0.0f32; parts.first().map_or(0, |part| part.len())];
    for part in parts {
        let Buffer::U16(part) = &**part else { bail!("another rank sent something else than bf16") };
        if part.len() != sums.len() {
            bail!("ranks sent {} and {} elements to be added up", sums.len(), part.len());
        }
        sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += bf16::from_bits(*x).upcast());
    }
    Ok(CpuStorage::BF16(rounded(&sums)))
}
