//! Layers on a GPU: made of candle's operations, which candle differentiates, with the values and gradients of the fused
//! layers of the CPU. Products are cuBLAS's.

use crate::rope::Rotation;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, D, DType, Device, Layout, Result, Shape, Storage, Tensor, bail};

/// Whether a tensor is on a GPU.
pub(crate) fn holds(tensor: &Tensor) -> bool {
    !tensor.device().is_cpu()
}

/// An operation of this crate, on the CPU wherever the tensor is; its result is where the tensor is.
pub(crate) fn on_host(x: &Tensor, op: impl CustomOp1 + 'static + Send + Sync) -> Result<Tensor> {
    x.contiguous()?.to_device(&Device::Cpu)?.apply_op1(op)?.to_device(x.device())
}

/// Zeros of f32, as an operation returns them.
pub(crate) fn zeros(like: &CudaStorage, shape: impl Into<Shape>) -> Result<(CudaStorage, Shape)> {
    let shape = shape.into();
    Ok((like.device().zeros_impl(&shape, DType::F32)?, shape))
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

/// As [`rms_norm`](crate::norm::rms_norm).
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let root = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
    x.broadcast_div(&root)?.broadcast_mul(weight)
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
    let zeros = Tensor::zeros((of, x.dim(1)?), x.dtype(), x.device())?;
    if x.elem_count() == 0 { Ok(zeros) } else { zeros.index_add(rows, &x.contiguous()?, 0) }
}

/// As [`rope`](crate::rope::rope).
pub(crate) fn rope(x: &Tensor, rotation: &Rotation) -> Result<Tensor> {
    let [cos, sin] = rotation.on(x.device())?;
    let back = sin.neg()?;
    let value = turned(&x.detach(), &cos, &sin)?;
    given(x, value, move |d| turned(d, &cos, &back))
}

/// x `[T, H, D]` by angles `[T, 1, D/2]`.
fn turned(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let half = cos.dim(D::Minus1)?;
    let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
    let first = (a.broadcast_mul(cos)? - b.broadcast_mul(sin)?)?;
    let second = (b.broadcast_mul(cos)? + a.broadcast_mul(sin)?)?;
    Tensor::cat(&[first, second], 2)
}

/// x times a constant of its shape.
pub(crate) fn masked(x: &Tensor, mask: Tensor) -> Result<Tensor> {
    let value = (x.detach() * &mask)?;
    given(x, value, move |d| d * &mask)
}
