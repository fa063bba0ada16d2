//! Operations for tensors on any device, composed of candle's on a GPU.

use crate::cast::cast;
use crate::gpu::{holds, precomputed};
use crate::tape::{self, Reads};
use candle_core::{CustomOp1, DType, Device, Result, Tensor};

/// Applies an operation of this crate that exists on the CPU only; a tensor on a GPU is copied there as f32, and the result
/// is copied back and converted to its type.
pub(crate) fn on_host(x: &Tensor, op: impl CustomOp1 + 'static + Send + Sync) -> Result<Tensor> {
    if !holds(x) {
        return tape::apply(op, [&x.contiguous()?], Reads::Nothing);
    }
    let host = cast(&x.contiguous()?, DType::F32)?.to_device(&Device::Cpu)?;
    cast(&host.apply_op1(op)?.to_device(x.device())?, x.dtype())
}

/// Selects rows of x, some of them perhaps more than once: `[T, C]` to `[rows, C]`.
pub(crate) fn gather_rows(x: &Tensor, rows: &[u32]) -> Result<Tensor> {
    let (of, rows) = (x.dim(0)?, Tensor::new(rows, x.device())?);
    let value = pick(&x.detach(), &rows)?;
    precomputed(x, value, move |d| add_up(d, &rows, of))
}

/// The transpose of [`gather_rows`]: adds each row to the row that it was selected from, `[rows, C]` to `[T, C]`.
pub(crate) fn scatter_add_rows(x: &Tensor, rows: &[u32], of: usize) -> Result<Tensor> {
    let rows = Tensor::new(rows, x.device())?;
    let value = add_up(&x.detach(), &rows, of)?;
    precomputed(x, value, move |d| pick(d, &rows))
}

fn pick(x: &Tensor, rows: &Tensor) -> Result<Tensor> {
    match rows.elem_count() * x.elem_count() {
        // Candle would start a kernel for tensors without elements, which a GPU refuses.
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

/// Multiplies x by a constant f32 tensor of its shape.
pub(crate) fn masked(x: &Tensor, mask: Tensor) -> Result<Tensor> {
    let times = move |x: &Tensor| cast(&(cast(x, DType::F32)? * &mask)?, x.dtype());
    let value = times(&x.detach())?;
    precomputed(x, value, times)
}
