//! The elements of CPU tensors as slices.

use crate::matmul::Matrix;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, bail};

/// The elements of a contiguous f32 storage.
pub(crate) fn cpu<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(data), Some((start, end))) => Ok(&data[start..end]),
        (CpuStorage::F32(_), None) => bail!("expected a contiguous tensor, given strides {:?}", layout.stride()),
        _ => bail!("expected f32, given {:?}", storage.dtype()),
    }
}

/// The same, to be changed.
pub(crate) fn cpu_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout) -> Result<&'a mut [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(data), Some((start, end))) => Ok(&mut data[start..end]),
        (CpuStorage::F32(_), None) => bail!("expected a contiguous tensor, given strides {:?}", layout.stride()),
        (storage, _) => bail!("expected f32, given {:?}", storage.dtype()),
    }
}

/// A matrix whose rows are contiguous, but may lie apart.
pub(crate) fn cpu_matrix<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<Matrix<'a>> {
    let (rows, cols) = layout.shape().dims2()?;
    match (storage, layout.stride()) {
        (CpuStorage::F32(data), &[stride, 1]) => {
            Ok(Matrix::strided(data.get(layout.start_offset()..).unwrap_or_default(), rows, cols, stride))
        }
        (CpuStorage::F32(_), stride) => bail!("expected contiguous rows, given strides {stride:?}"),
        _ => bail!("expected f32, given {:?}", storage.dtype()),
    }
}

/// A tensor whose rows [`cpu_matrix`] can read: a copy only if they are not contiguous.
pub(crate) fn rows(tensor: &Tensor) -> Result<Tensor> {
    match tensor.stride() {
        [stride, 1] if *stride > 0 => Ok(tensor.clone()),
        // Candle calls a tensor of one column contiguous whatever the stride of its columns is.
        _ => tensor.force_contiguous(),
    }
}

/// Calls `f` with the elements of a contiguous f32 tensor on the CPU.
pub(crate) fn values<T>(tensor: &Tensor, f: impl FnOnce(&[f32]) -> Result<T>) -> Result<T> {
    on_cpu(tensor, |storage, layout| f(cpu(storage, layout)?))
}

/// Calls `f` with a tensor from [`rows`].
pub(crate) fn matrix<T>(tensor: &Tensor, f: impl FnOnce(Matrix) -> Result<T>) -> Result<T> {
    on_cpu(tensor, |storage, layout| f(cpu_matrix(storage, layout)?))
}

fn on_cpu<T>(tensor: &Tensor, f: impl FnOnce(&CpuStorage, &Layout) -> Result<T>) -> Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => f(storage, layout),
        _ => bail!("expected a tensor on the CPU, given one on {:?}", tensor.device()),
    }
}
