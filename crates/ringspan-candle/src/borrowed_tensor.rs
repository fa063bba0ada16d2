//! Lends candle's tensors to attention's kernels without a copy, and turns their results into tensors.
//!
//! A tensor on the GPU on which the kernel computes is read in place: events order candle's stream and the kernel's, and no
//! CPU waits for either.

use crate::nvidia::{self, BorrowedSlice, Gpu};
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaDevice, CudaStorage, Device, Layout, Result, Shape, Storage, Tensor, bail};
use ringspan::Kernel;
use ringspan::kernel::{Data, Floats, View};

/// The elements of a tensor, f32 or bf16, borrowed by a kernel. Work that is started on the tensor's stream after the end of
/// the borrow runs after the kernels that read it.
pub(crate) struct BorrowedTensor<'a> {
    elements: Elements<'a>,
    layout: &'a Layout,
}

enum Elements<'a> {
    Cpu(Data<'a>),
    Gpu(BorrowedSlice<'a>),
}

/// Whether `kernel` reads tensors of this device in place. Others are copied to CPU memory first.
pub(crate) fn stays(kernel: &Kernel, device: &Device) -> bool {
    if device.is_cuda() {
        // For a tensor on another GPU, borrowing it returns the error.
        return Gpu::of(kernel).is_some();
    }
    device.is_cpu()
}

/// Returns the tensor as a kernel can borrow it: with a contiguous last dim, on a device from which the kernel reads.
pub(crate) fn readable(kernel: &Kernel, tensor: &Tensor) -> Result<Tensor> {
    let stays = stays(kernel, tensor.device());
    match tensor.stride().last() {
        Some(1) if stays => Ok(tensor.clone()),
        _ if stays => tensor.contiguous(),
        // Copying a view to another device copies its whole storage, so the view is made contiguous first.
        _ => tensor.contiguous()?.to_device(&Device::Cpu),
    }
}

impl<'a> BorrowedTensor<'a> {
    /// Borrows a tensor that [`readable`] returned, given by its storage.
    pub(crate) fn new(kernel: &Kernel, storage: &'a Storage, layout: &'a Layout) -> Result<Self> {
        match storage {
            Storage::Cpu(storage) => Self::cpu(storage, layout),
            Storage::Cuda(storage) => Self::cuda(kernel, storage, layout),
            _ => bail!("attention has no kernel for tensors on {:?}", storage.device()),
        }
    }

    /// Borrows a tensor on the CPU.
    pub(crate) fn cpu(storage: &'a CpuStorage, layout: &'a Layout) -> Result<Self> {
        match storage {
            CpuStorage::F32(elements) => Ok(Self { elements: Elements::Cpu(Data::F32(elements)), layout }),
            CpuStorage::BF16(elements) => Ok(Self { elements: Elements::Cpu(Data::Bf16(elements)), layout }),
            _ => bail!("attention computes in F32 and BF16, given {:?}", storage.dtype()),
        }
    }

    /// Borrows a tensor on the GPU on which `kernel` computes.
    pub(crate) fn cuda(kernel: &Kernel, storage: &'a CudaStorage, layout: &'a Layout) -> Result<Self> {
        let Some(gpu) = Gpu::of(kernel) else { bail!("{kernel:?} computes on no GPU, and the tensor is on one") };
        Ok(Self { elements: Elements::Gpu(nvidia::borrow(gpu, storage)?), layout })
    }

    /// All elements of the storage from the tensor's first one.
    fn rest(&self) -> Data<'_> {
        let all = match &self.elements {
            Elements::Cpu(elements) => *elements,
            Elements::Gpu(lent) => Data::Device(lent.data()),
        };
        all.slice(self.layout.start_offset().min(all.len())..all.len())
    }

    /// The tensor `[T, H, D]`, with its strides.
    pub(crate) fn view(&self) -> Result<View<'_>> {
        let (tokens, heads, dim) = self.layout.shape().dims3()?;
        let stride = self.layout.stride();
        Ok(View {
            data: self.rest(),
            tokens,
            heads,
            dim,
            token_stride: stride[0],
            head_stride: stride[1],
            rows: None,
            computes_in_f32: false,
        })
    }

    /// The elements of a contiguous tensor.
    pub(crate) fn data(&self) -> Result<Data<'_>> {
        let (rest, count) = (self.rest(), self.layout.shape().elem_count());
        if !self.layout.is_contiguous() || rest.len() < count {
            bail!(
                "expected a contiguous tensor, given {:?} with strides {:?}",
                self.layout.shape(),
                self.layout.stride()
            );
        }
        Ok(rest.slice(0..count))
    }
}

/// A kernel's result as a tensor on `device`; where both are on a GPU, candle's stream copies it.
pub(crate) fn tensor(kernel: &Kernel, values: Floats, shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    if let (Device::Cuda(cuda), Floats::Device(_)) = (device, &values) {
        return Ok(Tensor::from_storage(Storage::Cuda(on_gpu(values, cuda)?), shape, BackpropOp::none(), false));
    }
    let values = kernel.to_host(values).map_err(candle_core::Error::wrap)?;
    let storage = Storage::Cpu(CpuStorage::F32(values));
    Tensor::from_storage(storage, shape, BackpropOp::none(), false).to_device(device)
}

/// A kernel's result on a GPU, as a candle operation returns it.
pub(crate) fn on_gpu(values: Floats, device: &CudaDevice) -> Result<CudaStorage> {
    match values {
        Floats::Device(array) => nvidia::copied(&array, device),
        Floats::Host(values) => bail!("{} results that a kernel left on the CPU, for a GPU", values.len()),
    }
}
