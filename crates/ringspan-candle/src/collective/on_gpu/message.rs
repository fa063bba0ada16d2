//! Conversion of tensors on GPUs to messages and back.
//!
//! A tensor is handed to other ranks of this process without a copy. A rank on the same GPU shares candle's stream, so it
//! reads the tensor after the kernel that computed it; a rank on another GPU copies it from there. Ranks in other processes
//! receive a copy on their GPU. Events order candle's stream and the streams of the transfers; no CPU waits for either.

use candle_core::backend::BackendStorage;
use candle_core::cuda::CudaDType;
use candle_core::cuda::cudarc::driver::{CudaSlice, DeviceRepr};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, DType, Result, Shape, Storage, Tensor, bail};
use half::bf16;
use ringspan::comm::Buffer;
use ringspan_cuda::{GpuElement, GpuSource, SharedSlice};
use std::any::Any;
use std::sync::Arc;

/// The tensor x as a message. Nothing writes to its memory afterwards.
///
/// # Errors
/// Tensors of other types than f32 and bf16, and of other devices than GPUs.
pub(super) fn message(x: &Tensor) -> Result<Buffer> {
    let x = x.detach();
    // Candle would start a kernel for a tensor without elements, which a GPU refuses.
    let x = if x.elem_count() == 0 { x } else { x.contiguous()? };
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { bail!("a message of a tensor on {:?}", x.device()) };
    let handed = match storage.dtype() {
        DType::F32 => handed(storage.as_cuda_slice::<f32>()?, &x, layout.start_offset()),
        DType::BF16 => handed(storage.as_cuda_slice::<bf16>()?, &x, layout.start_offset()),
        other => bail!("collectives move tensors of f32 and bf16, given {other:?}"),
    };
    Ok(Buffer::Device(Arc::new(handed?)))
}

fn handed<T: GpuElement>(slice: &CudaSlice<T>, x: &Tensor, start: usize) -> Result<SharedSlice> {
    // An empty view may start beyond the end of its storage.
    let range = if x.elem_count() == 0 { 0..0 } else { start..start + x.elem_count() };
    // SAFETY: the tensor keeps its storage alive, and nothing writes to it any more.
    unsafe { SharedSlice::new(slice, range, x.clone()) }.map_err(candle_core::Error::wrap)
}

/// Checks that rank `from` sent `rows` rows like those of x.
///
/// # Errors
/// Any other message. If it comes from another process, only the number and width of its elements are known and checked.
pub(super) fn check(part: &Buffer, from: usize, x: &Tensor, rows: usize) -> Result<()> {
    let Buffer::Device(elements) = part else { bail!("rank {from} sent what lies on no GPU") };
    let wanted = crate::collective::with_rows(x.shape(), rows);
    if let Some(tensor) = tensor_of(part)
        && (tensor.shape() != &wanted || tensor.dtype() != x.dtype())
    {
        let (theirs, here) = (tensor.dtype(), x.dtype());
        bail!("rank {from} sent {theirs:?} {:?}, where {here:?} {wanted:?} is expected", tensor.shape());
    }
    let (got, width) = ((elements.elements(), elements.width()), x.dtype().size_in_bytes() as u64);
    if got != (wanted.elem_count(), width) {
        let (count, dtype) = (wanted.elem_count(), x.dtype());
        bail!(
            "rank {from} sent {} elements of {} bytes, where {count} of {dtype:?} are expected, {wanted:?}",
            got.0,
            got.1
        );
    }
    Ok(())
}

/// The tensor that was handed over, if it comes from a rank of this process.
fn tensor_of(part: &Buffer) -> Option<&Tensor> {
    let Buffer::Device(elements) = part else { return None };
    let elements: &dyn Any = &**elements;
    elements.downcast_ref().map(SharedSlice::owner)?.downcast_ref()
}

/// The received elements as a tensor of a shape that was checked, on the device and in the type of x.
pub(super) fn tensor(part: &Arc<Buffer>, shape: Shape, x: &Tensor) -> Result<Tensor> {
    match tensor_of(part) {
        Some(tensor) if tensor.device().same_device(x.device()) => Ok(tensor.clone()),
        _ => joined(std::slice::from_ref(part), shape, x),
    }
}

/// The concatenated parts, `shape` in all, on the device and in the type of x; each part is copied once.
pub(super) fn joined(parts: &[Arc<Buffer>], shape: Shape, x: &Tensor) -> Result<Tensor> {
    if shape.elem_count() == 0 {
        return Tensor::zeros(shape, x.dtype(), x.device());
    }
    match x.dtype() {
        DType::F32 => to_tensor::<f32>(parts, shape, x),
        DType::BF16 => to_tensor::<bf16>(parts, shape, x),
        other => bail!("collectives move tensors of f32 and bf16 on GPUs, given {other:?} on {:?}", x.device()),
    }
}

fn to_tensor<T: GpuElement + CudaDType + DeviceRepr>(
    parts: &[Arc<Buffer>],
    shape: Shape,
    x: &Tensor,
) -> Result<Tensor> {
    let device = x.device().as_cuda_device()?;
    // SAFETY: the copies below write all elements, or an error is returned and nothing reads them.
    let mut all = unsafe { device.alloc::<T>(shape.elem_count())? };
    let mut filled = 0;
    for part in parts {
        let source = match &**part {
            Buffer::Device(elements) => GpuSource::of(&**elements),
            _ => None,
        };
        let Some(source) = source else { bail!("another rank sent {} elements that lie on no GPU", part.len()) };
        let Some(mut to) = all.try_slice_mut(filled..filled + source.len()) else {
            bail!("other ranks sent more than the {} elements of {shape:?}", shape.elem_count());
        };
        source.copy_to(&mut to).map_err(candle_core::Error::wrap)?;
        filled += source.len();
    }
    if filled != shape.elem_count() {
        bail!("other ranks sent {filled} elements for {shape:?}");
    }
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(all, device.clone()));
    Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), false))
}
