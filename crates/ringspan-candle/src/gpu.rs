//! Layers on a GPU, with the values and gradients of those of the CPU: norms, rotations, gates and the loss are kernels,
//! products cuBLAS's, and the rest is made of candle's operations, which candle differentiates.
//!
//! Tensors are f32 or bf16. Of bf16, what is not a product is computed in f32, and rounded once, as a layer's result.

#[cfg(feature = "cuda")]
pub(crate) mod kernels;
#[cfg(feature = "cuda")]
pub(crate) mod operand;
#[cfg(feature = "cuda")]
pub(crate) mod product;

use crate::cast::cast;
use crate::tape::{self, Reads};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Result, Shape, Storage, Tensor, bail};

/// Whether a tensor is on a GPU.
pub(crate) fn holds(tensor: &Tensor) -> bool {
    !tensor.device().is_cpu()
}

/// A tensor as layers read it: contiguous; on a GPU rows may lie apart.
pub(crate) fn readable(x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if holds(x) {
        return operand::in_rows(x);
    }
    x.contiguous()
}

/// An operation of this crate, on the CPU wherever the tensor is; its result is where the tensor is.
/// Those of a GPU travel in f32, whatever their type.
pub(crate) fn on_host(x: &Tensor, op: impl CustomOp1 + 'static + Send + Sync) -> Result<Tensor> {
    if !holds(x) {
        return tape::apply(op, [&x.contiguous()?], Reads::Nothing);
    }
    let host = cast(&x.contiguous()?, DType::F32)?.to_device(&Device::Cpu)?;
    cast(&host.apply_op1(op)?.to_device(x.device())?, x.dtype())
}

/// Zeros of the same type, as an operation returns them.
pub(crate) fn zeros(like: &CudaStorage, shape: impl Into<Shape>) -> Result<(CudaStorage, Shape)> {
    let shape = shape.into();
    Ok((like.device().zeros_impl(&shape, like.dtype())?, shape))
}

/// Elements in another type, as an operation returns them.
pub(crate) fn converted(x: &CudaStorage, at: &Layout, to: DType) -> Result<CudaStorage> {
    match at.shape().elem_count() {
        // A GPU starts no kernel for nothing.
        0 => x.device().zeros_impl(at.shape(), to),
        _ => x.to_dtype(at, to),
    }
}

/// What an operation computed, in the type in which it returns it.
#[cfg(feature = "cuda")]
pub(crate) fn converted_if(x: CudaStorage, shape: &Shape, to: DType) -> Result<CudaStorage> {
    if x.dtype() == to { Ok(x) } else { converted(&x, &Layout::contiguous(shape), to) }
}

/// A tensor as an operation returns it: a copy.
pub(crate) fn copied(tensor: &Tensor) -> Result<(CudaStorage, Shape)> {
    // Of its elements alone: copying a storage copies all of it.
    let tensor = tensor.force_contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => Ok((storage.try_clone(layout)?, tensor.shape().clone())),
        _ => bail!("expected a tensor on a GPU, given one on {:?}", tensor.device()),
    }
}

/// What is computed already, with a backward of its own: candle's would also differentiate what is constant.
struct Given<F> {
    value: Tensor,
    backward: F,
}

/// `value`, computed from x, whose gradient in x `backward` makes of that in `value`.
pub(crate) fn given<F>(x: &Tensor, value: Tensor, backward: F) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
{
    if x.track_op() { x.apply_op1(Given { value, backward }) } else { Ok(value) }
}

impl<F: Fn(&Tensor) -> Result<Tensor>> CustomOp1 for Given<F> {
    fn name(&self) -> &'static str {
        "given"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("made for tensors on a GPU")
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        copied(&self.value)
    }

    fn bwd(&self, _x: &Tensor, _value: &Tensor, d: &Tensor) -> Result<Option<Tensor>> {
        (self.backward)(d).map(Some)
    }
}

/// Rows of x, some of them perhaps more than once: `[T, C]` to `[rows, C]`.
pub(crate) fn picked(x: &Tensor, rows: &[u32]) -> Result<Tensor> {
    let (of, rows) = (x.dim(0)?, Tensor::new(rows, x.device())?);
    let value = pick(&x.detach(), &rows)?;
    given(x, value, move |d| add_up(d, &rows, of))
}

/// Rows added up where they were picked from: `[rows, C]` to `[T, C]`.
pub(crate) fn put_back(x: &Tensor, rows: &[u32], of: usize) -> Result<Tensor> {
    let rows = Tensor::new(rows, x.device())?;
    let value = add_up(&x.detach(), &rows, of)?;
    given(x, value, move |d| pick(d, &rows))
}

fn pick(x: &Tensor, rows: &Tensor) -> Result<Tensor> {
    match rows.elem_count() * x.elem_count() {
        // Candle starts no kernels for tensors without elements.
        0 => Tensor::zeros((rows.elem_count(), x.dim(1)?), x.dtype(), x.device()),
        _ => x.contiguous()?.index_select(rows, 0),
    }
}

fn add_up(x: &Tensor, rows: &Tensor, of: usize) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return Tensor::zeros((of, x.dim(1)?), x.dtype(), x.device());
    }
    let zeros = Tensor::zeros((of, x.dim(1)?), DType::F32, x.device())?;
    cast(&zeros.index_add(rows, &cast(&x.contiguous()?, DType::F32)?, 0)?, x.dtype())
}

/// x times a constant of its shape, f32.
pub(crate) fn masked(x: &Tensor, mask: Tensor) -> Result<Tensor> {
    let times = move |x: &Tensor| cast(&(cast(x, DType::F32)? * &mask)?, x.dtype());
    let value = times(&x.detach())?;
    given(x, value, times)
}
