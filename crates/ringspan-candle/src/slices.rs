//! The elements of CPU tensors as slices.

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

/// Calls `f` with the elements of a contiguous f32 tensor on the CPU.
pub(crate) fn values<T>(tensor: &Tensor, f: impl FnOnce(&[f32]) -> Result<T>) -> Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => f(cpu(storage, layout)?),
        _ => bail!("expected a tensor on the CPU, given one on {:?}", tensor.device()),
    }
}
