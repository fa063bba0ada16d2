//! Matrix products of tensors on the CPU, without a graph.

use crate::cast::cast;
use crate::matmul::product_new;
use crate::slices;
use candle_core::{DType, Result, Tensor, bail};
use half::bf16;

/// `a b` in f32, without a graph: a `[m, k]`, b `[k, n]` on the CPU. Where one factor is bf16, the other is rounded to bf16,
/// so that the processor can multiply in bf16; sums are f32.
pub(crate) fn product_of(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if a.dtype() != DType::BF16 && b.dtype() != DType::BF16 {
        return a.matmul(b);
    }
    let rounded = |tensor: &Tensor| match tensor.stride() {
        // A transposed view is rounded in its order in memory.
        [1, stride] if *stride > 1 => cast(&tensor.t()?, DType::BF16)?.t(),
        _ => cast(tensor, DType::BF16),
    };
    let (a, b) = (rounded(&a.detach())?, rounded(&b.detach())?);
    let ((m, k), (rows, n)) = (a.dims2()?, b.dims2()?);
    if rows != k {
        bail!("a product of {:?} and {:?}: the shapes do not fit", a.shape(), b.shape());
    }
    let out =
        slices::with_lines::<bf16, _>(&a, |a| slices::with_lines::<bf16, _>(&b, |b| Ok(product_new(a, b, None))))?;
    Tensor::from_vec(out, (m, n), a.device())
}
