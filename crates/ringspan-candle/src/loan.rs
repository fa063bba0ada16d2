//! Tensors lent to the library where they are, and its results as tensors.
//!
//! A tensor on the GPU of the kernel that borrows it is read there: events order candle's stream and the kernel's, and no CPU
//! waits for either.

use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, Device, Layout, Result, Shape, Storage, Tensor, bail};
#[cfg(feature = "cuda")]
use candle_core::{CudaDevice, CudaStorage, DType};
use ringspan::Kernel;
use ringspan::kernel::{Data, Floats, View};

/// The elements of a tensor, f32 or bf16. What is started on the tensor's stream behind the end of a loan comes behind what read it.
pub(crate) struct Loan<'a> {
    elements: Elements<'a>,
    layout: &'a Layout,
}

enum Elements<'a> {
    Cpu(Data<'a>),
    #[cfg(feature = "cuda")]
    Gpu(ringspan::kernel::Lent<'a>),
}

/// Whether `kernel` reads tensors of this device where they are. Others go through the memory of the CPU.
pub(crate) fn stays(kernel: &Kernel, device: &Device) -> bool {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        // Of another GPU the loan says what is wrong.
        return kernel.gpu().is_some();
    }
    let _ = kernel;
    device.is_cpu()
}

/// The tensor as a kernel can read it: its last dimension contiguous, and where a loan can be made of it.
pub(crate) fn readable(kernel: &Kernel, tensor: &Tensor) -> Result<Tensor> {
    let stays = stays(kernel, tensor.device());
    match tensor.stride().last() {
        Some(1) if stays => Ok(tensor.clone()),
        _ if stays => tensor.contiguous(),
        // Moving a tensor moves all that it is a part of.
        _ => tensor.contiguous()?.to_device(&Device::Cpu),
    }
}

impl<'a> Loan<'a> {
    /// Of a tensor that [`readable`] gave, or of its storage.
    pub(crate) fn new(kernel: &Kernel, storage: &'a Storage, layout: &'a Layout) -> Result<Self> {
        match storage {
            Storage::Cpu(storage) => Self::cpu(storage, layout),
            #[cfg(feature = "cuda")]
            Storage::Cuda(storage) => Self::cuda(kernel, storage, layout),
            _ => {
                let _ = kernel;
                bail!("attention has no kernel for tensors on {:?}", storage.device())
            }
        }
    }

    /// Of what the CPU holds.
    pub(crate) fn cpu(storage: &'a CpuStorage, layout: &'a Layout) -> Result<Self> {
        match storage {
            CpuStorage::F32(elements) => Ok(Self { elements: Elements::Cpu(Data::F32(elements)), layout }),
            CpuStorage::BF16(elements) => Ok(Self { elements: Elements::Cpu(Data::Bf16(elements)), layout }),
            _ => bail!("attention computes in F32 and BF16, given {:?}", storage.dtype()),
        }
    }

    /// Of what the GPU holds on which `kernel` computes.
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda(kernel: &Kernel, storage: &'a CudaStorage, layout: &'a Layout) -> Result<Self> {
        let lent = match storage.dtype() {
            DType::F32 => kernel.borrow(storage.as_cuda_slice::<f32>()?),
            DType::BF16 => kernel.borrow(storage.as_cuda_slice::<half::bf16>()?),
            other => bail!("attention computes in F32 and BF16, given {other:?}"),
        };
        Ok(Self { elements: Elements::Gpu(lent.map_err(candle_core::Error::wrap)?), layout })
    }

    /// All elements of the storage from the tensor's first.
    fn rest(&self) -> Data<'_> {
        let all = match &self.elements {
            Elements::Cpu(elements) => *elements,
            #[cfg(feature = "cuda")]
            Elements::Gpu(lent) => Data::Gpu(lent.data()),
        };
        all.slice(self.layout.start_offset().min(all.len())..all.len())
    }

    /// The tensor `[T, H, D]`, in its strides.
    pub(crate) fn view(&self) -> Result<View<'_>> {
        let (tokens, heads, dim) = self.layout.shape().dims3()?;
        let stride = self.layout.stride();
        Ok(View { data: self.rest(), tokens, heads, dim, token_stride: stride[0], head_stride: stride[1] })
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

/// What a kernel computed, as a tensor on `device`: a copy where both are on a GPU, which candle's stream makes.
pub(crate) fn tensor(kernel: &Kernel, values: Floats, shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    #[cfg(feature = "cuda")]
    if let (Device::Cuda(cuda), Floats::Gpu(_)) = (device, &values) {
        return Ok(Tensor::from_storage(Storage::Cuda(on_gpu(values, cuda)?), shape, BackpropOp::none(), false));
    }
    let values = kernel.to_host(values).map_err(candle_core::Error::wrap)?;
    let storage = Storage::Cpu(CpuStorage::F32(values));
    Tensor::from_storage(storage, shape, BackpropOp::none(), false).to_device(device)
}

/// What a kernel computed on a GPU, as an operation of candle returns it.
#[cfg(feature = "cuda")]
pub(crate) fn on_gpu(values: Floats, device: &CudaDevice) -> Result<CudaStorage> {
    match values {
        Floats::Gpu(array) => {
            let copied = array.copied_on(&device.cuda_stream()).map_err(candle_core::Error::wrap)?;
            Ok(CudaStorage::wrap_cuda_slice(copied, device.clone()))
        }
        Floats::Host(values) => bail!("{} results that a kernel left on the CPU, for a GPU", values.len()),
    }
}
