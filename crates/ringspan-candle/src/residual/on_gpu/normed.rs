//! The residual sum and its norm on a GPU by one kernel, and their gradients by another.
//!
//! A candle operation has one result and sees the gradient of that result alone. So the sum and its norm are the results of
//! two operations, which both take the result of a third operation, [`SumAndNorm`]. Their backward passes store their gradients for
//! that of [`SumAndNorm`], which runs last. In candle's graph, a scalar 0 is passed between them.

use crate::gpu::operand::{on_gpu, tensor};
use crate::gpu::{readable, zeros};
use crate::norm;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, CustomOp3, Layout, Result, Shape, Tensor, bail};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Like [`residual_norm`](crate::residual::residual_norm), for tensors that are not empty.
pub(in crate::residual) fn residual_norm(
    x: &Tensor,
    y: &Tensor,
    weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let (x, y, weight) = (readable(x)?, readable(y)?, weight.contiguous()?);
    let [sum, normed] = {
        let ((x, x_at), (y, y_at), (w, w_at)) =
            (x.storage_and_layout(), y.storage_and_layout(), weight.storage_and_layout());
        norm::on_gpu::forward_of_sum((on_gpu(&x)?, x_at), (on_gpu(&y)?, y_at), (on_gpu(&w)?, w_at), eps)?
    };
    if ![&x, &y, &weight].iter().any(|tensor| tensor.track_op()) {
        return Ok((tensor(sum, x.shape()), tensor(normed, x.shape())));
    }
    let shared = Arc::new(SharedGradients::default());
    let both = x.apply_op3(&y, &weight, SumAndNorm { eps, shared: shared.clone() })?;
    let part = |which: ResidualOutput, value: CudaStorage| {
        let value = Mutex::new(Some((value, x.shape().clone())));
        both.apply_op1(FusedResult { which, value, shared: shared.clone() })
    };
    let (sum, normed) = (part(ResidualOutput::Sum, sum)?, part(ResidualOutput::Normed, normed)?);
    // Detached, since the graph of the sum leads back here.
    shared.sum.get_or_init(|| sum.detach());
    Ok((sum, normed))
}

#[derive(Debug, Clone, Copy)]
enum ResidualOutput {
    Sum,
    Normed,
}

/// The state that the three operations share.
#[derive(Default)]
struct SharedGradients {
    sum: OnceLock<Tensor>,
    /// The gradients of the sum and of its norm, until [`SumAndNorm`] uses them.
    gradients: Mutex<[Option<Tensor>; 2]>,
}

impl SharedGradients {
    fn leave(&self, which: ResidualOutput, gradient: &Tensor) {
        self.gradients.lock().unwrap_or_else(PoisonError::into_inner)[which as usize] = Some(gradient.clone());
    }

    fn take(&self) -> [Option<Tensor>; 2] {
        std::mem::take(&mut *self.gradients.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The sum or its norm, whose value is computed already.
struct FusedResult {
    which: ResidualOutput,
    value: Mutex<Option<(CudaStorage, Shape)>>,
    shared: Arc<SharedGradients>,
}

impl CustomOp1 for FusedResult {
    fn name(&self) -> &'static str {
        match self.which {
            ResidualOutput::Sum => "residual of a norm",
            ResidualOutput::Normed => "norm of a residual",
        }
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("made for tensors on a GPU")
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        match self.value.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(value) => Ok(value),
            None => bail!("{} is computed once", self.name()),
        }
    }

    fn bwd(&self, both: &Tensor, _value: &Tensor, d: &Tensor) -> Result<Option<Tensor>> {
        self.shared.leave(self.which, d);
        // The scalar 0 is returned as a gradient so that candle visits [`SumAndNorm`].
        Ok(Some(both.detach()))
    }
}

/// The operation from which the sum and its norm are derived.
struct SumAndNorm {
    eps: f64,
    shared: Arc<SharedGradients>,
}

impl CustomOp3 for SumAndNorm {
    fn name(&self) -> &'static str {
        "residual and norm"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("made for tensors on a GPU")
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        zeros(x, ())
    }

    fn bwd(
        &self,
        x: &Tensor,
        y: &Tensor,
        weight: &Tensor,
        _both: &Tensor,
        _d: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (d, d_weight) = match (self.shared.take(), self.shared.sum.get()) {
            ([d_sum, Some(d_normed)], Some(sum)) => {
                let (d, d_weight) = norm::on_gpu::backward(sum, weight, &d_normed, d_sum.as_ref(), self.eps)?;
                (Some(d), d_weight)
            }
            ([d_sum, _], _) => (d_sum, None),
        };
        let of = |summand: &Tensor| d.clone().filter(|_| summand.track_op());
        Ok((of(x), of(y), d_weight))
    }
}
