//! Access of kernels to candle's tensors in GPU memory.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result, Shape, Storage, Tensor, bail};
use half::bf16;

/// Elements on a GPU that a kernel reads or writes. Events order the work that is started while this exists and other uses of
/// the elements.
pub(crate) struct Operand<'a> {
    /// The address of the first element.
    pub(crate) at: u64,
    _order: SyncOnDrop<'a>,
}

impl<'a> Operand<'a> {
    /// A tensor that a kernel reads.
    ///
    /// # Errors
    /// Types other than f32 and bf16.
    pub(crate) fn read(storage: &'a CudaStorage, layout: &Layout, stream: &'a CudaStream) -> Result<Self> {
        let (first, _order) = match storage.dtype() {
            DType::F32 => storage.as_cuda_slice::<f32>()?.device_ptr(stream),
            DType::BF16 => storage.as_cuda_slice::<bf16>()?.device_ptr(stream),
            other => bail!("layers compute in F32 and BF16 on GPUs, given {other:?}"),
        };
        Ok(Self { at: first + (layout.start_offset() * storage.dtype().size_in_bytes()) as u64, _order })
    }

    /// A tensor of u32 that a kernel reads.
    ///
    /// # Errors
    /// Types other than u32.
    pub(crate) fn read_u32(storage: &'a CudaStorage, layout: &Layout, stream: &'a CudaStream) -> Result<Self> {
        let (first, _order) = storage.as_cuda_slice::<u32>()?.device_ptr(stream);
        Ok(Self { at: first + (layout.start_offset() * size_of::<u32>()) as u64, _order })
    }

    /// A storage that a kernel writes completely.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub(crate) fn written(storage: &'a mut CudaStorage, stream: &'a CudaStream) -> Result<Self> {
        let (at, _order) = match storage.dtype() {
            DType::F32 => storage.as_cuda_slice_mut::<f32>()?.device_ptr_mut(stream),
            DType::BF16 => storage.as_cuda_slice_mut::<bf16>()?.device_ptr_mut(stream),
            other => bail!("layers compute in F32 and BF16 on GPUs, given {other:?}"),
        };
        Ok(Self { at, _order })
    }
}

/// Uninitialized memory for a tensor that a kernel will write completely.
pub(crate) fn unwritten(device: &CudaDevice, shape: &Shape, dtype: DType) -> Result<CudaStorage> {
    // SAFETY: the caller starts a kernel that writes all of it, or fails and lets nothing read it.
    unsafe { device.alloc_uninit(shape, dtype) }
}

/// A storage that a kernel wrote, as a tensor without a graph.
pub(crate) fn tensor(storage: CudaStorage, shape: &Shape) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage), shape.clone(), BackpropOp::none(), false)
}

/// The storage of a tensor on a GPU.
pub(crate) fn on_gpu(storage: &Storage) -> Result<&CudaStorage> {
    match storage {
        Storage::Cuda(storage) => Ok(storage),
        _ => bail!("expected a tensor on a GPU"),
    }
}

/// A tensor as rows of its last dim, each with contiguous elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StridedRows {
    pub(crate) count: usize,
    pub(crate) width: usize,
    /// The distance from one row to the next, in elements.
    pub(crate) stride: usize,
}

impl StridedRows {
    /// The rows of a layout; `None` if rows do not lie at equal distances, or their elements are not contiguous.
    pub(crate) fn of(layout: &Layout) -> Option<Self> {
        let (width, elements) = (layout.dims().last().copied().unwrap_or(1), layout.shape().elem_count());
        if elements == 0 {
            return Some(Self { count: 0, width, stride: width });
        }
        // Dims are visited from the innermost one; the stride of a dim of size 1 says nothing and is skipped.
        let mut dims = layout.dims().iter().zip(layout.stride()).rev().map(|(&dim, &stride)| (dim, stride));
        let innermost = dims.next().unwrap_or((1, 1));
        let mut outer = dims.filter(|(dim, _)| *dim > 1);
        let (mut rows, stride) = outer.next().unwrap_or((1, width));
        let even = outer.all(|(dim, outer_stride)| {
            let even = outer_stride == stride * rows;
            rows *= dim;
            even
        });
        (even && (innermost.0 == 1 || innermost.1 == 1)).then_some(Self { count: rows, width, stride })
    }

    /// The rows of a layout that [`in_rows`] has returned.
    ///
    /// # Errors
    /// A layout that does not consist of rows.
    pub(crate) fn expected(layout: &Layout) -> Result<Self> {
        match Self::of(layout) {
            Some(rows) => Ok(rows),
            None => bail!("rows of {:?} with strides {:?} lie in uneven distances", layout.shape(), layout.stride()),
        }
    }
}

/// The tensor as it is if it consists of rows, otherwise a contiguous copy.
pub(crate) fn in_rows(x: &Tensor) -> Result<Tensor> {
    if StridedRows::of(x.layout()).is_some() { Ok(x.clone()) } else { x.contiguous() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn rows_are_found_in_strides() -> Result<()> {
        let x = Tensor::zeros((4, 3, 8), DType::F32, &Device::Cpu)?;
        let rows =
            |x: &Tensor| StridedRows::of(x.layout()).map(|StridedRows { count, width, stride }| (count, width, stride));
        assert_eq!(rows(&x), Some((12, 8, 8)));
        assert_eq!(rows(&x.narrow(2, 2, 5)?), Some((12, 5, 8)));
        assert_eq!(rows(&x.narrow(1, 1, 1)?), Some((4, 8, 24)));
        assert_eq!(rows(&x.narrow(0, 1, 1)?.narrow(1, 2, 1)?), Some((1, 8, 8)));
        assert_eq!(rows(&x.narrow(1, 0, 2)?), None, "of each three two");
        assert_eq!(rows(&x.transpose(1, 2)?), None);
        assert_eq!(rows(&x.transpose(0, 1)?), None);
        assert_eq!(rows(&x.narrow(0, 0, 1)?.transpose(0, 1)?), Some((3, 8, 8)));
        assert_eq!(rows(&x.transpose(1, 2)?.narrow(2, 0, 1)?), None, "of each three rows the first");
        assert_eq!(rows(&x.flatten_to(1)?.t()?.narrow(1, 5, 1)?), Some((8, 1, 1)), "a column of one place");
        let row = Tensor::zeros((1, 8), DType::F32, &Device::Cpu)?;
        assert_eq!(rows(&row.broadcast_as((5, 8))?), Some((5, 8, 0)), "the same row, five times");
        assert_eq!(rows(&row.t()?.broadcast_as((8, 5))?), None, "the same number, five times");
        assert_eq!(rows(&Tensor::zeros((), DType::F32, &Device::Cpu)?), Some((1, 1, 1)));
        assert_eq!(rows(&x.narrow(1, 0, 0)?), Some((0, 8, 8)));
        assert!(in_rows(&x.transpose(0, 1)?)?.is_contiguous());
        Ok(())
    }
}
