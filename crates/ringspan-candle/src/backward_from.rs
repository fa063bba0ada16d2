//! A backward pass that starts from a given gradient of the output, as PyTorch's `y.backward(dy)` does; candle's own starts from ones.

use crate::gpu;
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

/// Gradients of `sum(dy * y)` with respect to everything that y was computed from.
///
/// # Errors
/// A `dy` of another shape than y, and failures of the operations that computed y.
pub fn backward(y: &Tensor, dy: &Tensor) -> Result<GradStore> {
    if y.shape() != dy.shape() {
        bail!("a gradient of {:?} for {:?}", dy.shape(), y.shape());
    }
    y.apply_op1(OutputGradient { dy: dy.detach() })?.backward()
}

/// A scalar whose gradient with respect to its input is `dy`. Its value is never read.
struct OutputGradient {
    dy: Tensor,
}

impl CustomOp1 for OutputGradient {
    fn name(&self) -> &'static str {
        "output-gradient"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn cuda_fwd(&self, y: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        gpu::zeros(y, ())
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.dy.clone()))
    }
}
