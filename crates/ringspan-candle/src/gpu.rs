//! Layers on a GPU, with the values and gradients of the CPU's layers: norms, rotary embeddings, gates and the loss are
//! kernels of this crate, matrix products are cuBLAS's, and the rest is composed of candle's operations, which candle
//! differentiates.
//!
//! Tensors are f32 or bf16. In bf16, everything but matrix products is computed in f32, and rounded once, as the result of a
//! layer.

#[cfg(feature = "cuda")]
pub(crate) mod kernels;
#[cfg_attr(not(feature = "cuda"), path = "gpu/without_operand.rs")]
pub(crate) mod operand;
#[cfg_attr(not(feature = "cuda"), path = "gpu/without_product.rs")]
pub(crate) mod product;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Storage, Tensor, bail};

/// Whether a tensor is on a GPU.
pub(crate) fn holds(tensor: &Tensor) -> bool {
    !tensor.device().is_cpu()
}

/// Returns x in a layout that layers can read: contiguous, or on a GPU with contiguous rows that may lie apart.
pub(crate) fn readable(x: &Tensor) -> Result<Tensor> {
    if holds(x) {
        return operand::in_rows(x);
    }
    x.contiguous()
}

/// Zeros of the type of `like`, as an operation returns them.
pub(crate) fn zeros(like: &CudaStorage, shape: impl Into<Shape>) -> Result<(CudaStorage, Shape)> {
    let shape = shape.into();
    Ok((like.device().zeros_impl(&shape, like.dtype())?, shape))
}

/// The elements converted to type `to`, as an operation returns them.
pub(crate) fn converted(x: &CudaStorage, at: &Layout, to: DType) -> Result<CudaStorage> {
    match at.shape().elem_count() {
        // A GPU refuses to start a kernel for a tensor without elements.
        0 => x.device().zeros_impl(at.shape(), to),
        _ => x.to_dtype(at, to),
    }
}

/// The result of an operation, converted to type `to` if it has another.
pub(crate) fn converted_if(x: CudaStorage, shape: &Shape, to: DType) -> Result<CudaStorage> {
    if x.dtype() == to { Ok(x) } else { converted(&x, &Layout::contiguous(shape), to) }
}

/// A copy of a tensor, as an operation returns it.
pub(crate) fn copied(tensor: &Tensor) -> Result<(CudaStorage, Shape)> {
    // Cloning a storage copies all of it, so the elements of a view are made contiguous first.
    let tensor = tensor.force_contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => Ok((storage.try_clone(layout)?, tensor.shape().clone())),
        _ => bail!("expected a tensor on a GPU, given one on {:?}", tensor.device()),
    }
}

/// An operation whose value is computed already, with a backward pass of its own: candle's would also differentiate
/// constants.
struct Precomputed<F> {
    value: Tensor,
    backward: F,
}

/// Returns `value`, which was computed from x; `backward` turns the gradient of `value` into that of x.
pub(crate) fn precomputed<F>(x: &Tensor, value: Tensor, backward: F) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
{
    if x.track_op() { x.apply_op1(Precomputed { value, backward }) } else { Ok(value) }
}

impl<F: Fn(&Tensor) -> Result<Tensor>> CustomOp1 for Precomputed<F> {
    fn name(&self) -> &'static str {
        "precomputed"
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
