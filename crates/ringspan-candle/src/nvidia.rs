//! Connects the GPUs of `ringspan_cuda` with candle's tensors.

pub(crate) use ringspan_cuda::{BorrowedSlice, Gpu};

use candle_core::backend::BackendStorage;
use candle_core::{CudaDevice, CudaStorage, DType, Result, bail};
use ringspan::kernel::DeviceArray;
use ringspan_cuda::{GpuMemory, GpuSource};

/// Borrows all elements, f32 or bf16, of a tensor on this GPU.
pub(crate) fn borrow<'a>(gpu: &Gpu, storage: &'a CudaStorage) -> Result<BorrowedSlice<'a>> {
    let lent = match storage.dtype() {
        DType::F32 => gpu.borrow(storage.as_cuda_slice::<f32>()?),
        DType::BF16 => gpu.borrow(storage.as_cuda_slice::<half::bf16>()?),
        other => bail!("attention computes in F32 and BF16, given {other:?}"),
    };
    lent.map_err(candle_core::Error::wrap)
}

/// Copies a kernel's result on candle's stream.
pub(crate) fn copied(array: &DeviceArray, device: &CudaDevice) -> Result<CudaStorage> {
    let Some(source) = GpuSource::of_array(array) else { bail!("{array:?} is on no GPU") };
    let copied = source.copied_on(&device.cuda_stream()).map_err(candle_core::Error::wrap)?;
    Ok(CudaStorage::wrap_cuda_slice(copied, device.clone()))
}

/// Free and total bytes of the memory of a GPU.
pub(crate) fn memory(gpu: &Gpu) -> ringspan::Result<[u64; 2]> {
    let GpuMemory { free, total } = gpu.memory()?;
    Ok([free, total])
}
