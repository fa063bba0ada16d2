//! Access to the elements of CPU tensors as slices and matrices.

use crate::matmul::Matrix;
use crate::number::Number;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, bail};
use std::borrow::Cow;

/// The elements of a contiguous f32 storage.
pub(crate) fn cpu<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(data), Some((start, end))) => Ok(&data[start..end]),
        (CpuStorage::F32(_), None) => bail!("expected a contiguous tensor, given strides {:?}", layout.stride()),
        _ => bail!("expected f32, given {:?}", storage.dtype()),
    }
}

/// The elements of a contiguous storage of type `T`.
pub(crate) fn elements<'a, T: Number>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    match layout.contiguous_offsets() {
        // An empty view may start beyond the end of its storage.
        Some((start, end)) => Ok(slice_of::<T>(storage)?.get(start..end).unwrap_or_default()),
        None => bail!("expected a contiguous tensor, given strides {:?}", layout.stride()),
    }
}

/// Like [`elements`], with mutable access.
pub(crate) fn elements_mut<'a, T: Number>(storage: &'a mut CpuStorage, layout: &Layout) -> Result<&'a mut [T]> {
    let dtype = storage.dtype();
    match (layout.contiguous_offsets(), T::of_storage(storage)) {
        (Some((start, end)), Some(elements)) => Ok(elements.get_mut(start..end).unwrap_or_default()),
        (None, _) => bail!("expected a contiguous tensor, given strides {:?}", layout.stride()),
        (_, None) => bail!("expected {:?}, given {dtype:?}", T::DTYPE),
    }
}

/// The elements of a contiguous storage in f32; bf16 elements are copied, so this is for small weights.
pub(crate) fn widened<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<Cow<'a, [f32]>> {
    Ok(match storage {
        CpuStorage::BF16(_) => {
            Cow::Owned(elements::<half::bf16>(storage, layout)?.iter().map(|x| x.upcast()).collect())
        }
        _ => Cow::Borrowed(cpu(storage, layout)?),
    })
}

/// A matrix of type `T` whose rows are contiguous, but may lie apart.
pub(crate) fn matrix_of<'a, T: Number>(storage: &'a CpuStorage, layout: &Layout) -> Result<Matrix<'a, T>> {
    let (rows, cols) = layout.shape().dims2()?;
    match layout.stride() {
        &[stride, 1] => {
            let all = slice_of::<T>(storage)?;
            Ok(Matrix::strided(all.get(layout.start_offset()..).unwrap_or_default(), rows, cols, stride))
        }
        stride => bail!("expected contiguous rows, given strides {stride:?}"),
    }
}

fn slice_of<T: Number>(storage: &CpuStorage) -> Result<&[T]> {
    match storage.dtype() == T::DTYPE {
        true => T::cpu_storage_as_slice(storage),
        false => bail!("expected {:?}, given {:?}", T::DTYPE, storage.dtype()),
    }
}

/// Returns the tensor with contiguous rows, as [`matrix_of`] needs them; it is copied only if they are not contiguous.
pub(crate) fn rows(tensor: &Tensor) -> Result<Tensor> {
    match tensor.stride() {
        [stride, 1] if *stride > 0 => Ok(tensor.clone()),
        // Candle calls a tensor of one column contiguous whatever its stride is.
        _ => tensor.force_contiguous(),
    }
}

/// Calls `f` with the elements of a contiguous f32 tensor on the CPU.
pub(crate) fn values<T>(tensor: &Tensor, f: impl FnOnce(&[f32]) -> Result<T>) -> Result<T> {
    on_cpu(tensor, |storage, layout| f(cpu(storage, layout)?))
}

/// Calls `f` with the elements of a contiguous tensor of type `T` on the CPU.
pub(crate) fn elements_of<T: Number, R>(tensor: &Tensor, f: impl FnOnce(&[T]) -> Result<R>) -> Result<R> {
    on_cpu(tensor, |storage, layout| f(elements(storage, layout)?))
}

/// Calls `f` with a tensor of type `T` that [`rows`] returned.
pub(crate) fn with_matrix<T: Number, R>(tensor: &Tensor, f: impl FnOnce(Matrix<T>) -> Result<R>) -> Result<R> {
    on_cpu(tensor, |storage, layout| f(matrix_of(storage, layout)?))
}

/// Calls `f` with a matrix of type `T` on the CPU whose rows or columns are contiguous; others are copied first.
pub(crate) fn with_lines<T: Number, R>(tensor: &Tensor, f: impl FnOnce(Matrix<T>) -> Result<R>) -> Result<R> {
    match tensor.stride() {
        [1, stride] if *stride > 1 => with_matrix(&tensor.t()?, |matrix: Matrix<T>| f(matrix.t())),
        _ => with_matrix(&rows(tensor)?, f),
    }
}

fn on_cpu<T>(tensor: &Tensor, f: impl FnOnce(&CpuStorage, &Layout) -> Result<T>) -> Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => f(storage, layout),
        _ => bail!("expected a tensor on the CPU, given one on {:?}", tensor.device()),
    }
}
