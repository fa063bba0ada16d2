//! A linear layer as one operation with a backward.

use crate::cast::cast;
use crate::gpu;
use crate::kept::Kept;
use crate::matmul::{Into, Matrix, product};
use crate::slices::{cpu, cpu_matrix, matrix, rows, values};
use crate::tape::{self, Reads};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Tensor, bail, op};
use std::sync::{Mutex, PoisonError};

/// `x weight^T + bias`: x `[T, in]`, weight `[out, in]`, bias `[out]` to `[T, out]`, f32 or, on a GPU, bf16 with sums in f32.
///
/// Rows of x may lie apart (a part of a wider tensor); nothing is transposed in memory.
///
/// # Errors
/// Other types and shapes.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    layer(x, weight, bias, Linear::default())
}

/// The same for a layer that was computed before: its values are `known`, or zeros where nothing looks at them, and cost no
/// product. x and weights must be those of then.
///
/// # Errors
/// As for [`linear`]; something known of another shape.
pub fn linear_again(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, known: Option<Kept>) -> Result<Tensor> {
    let shape = [x.dim(0)?, weight.dim(0)?];
    if gpu::holds(x) {
        let known = match known {
            None => Tensor::zeros(&shape, x.dtype(), x.device())?,
            Some(known) => known.of(&shape)?.tensor()?,
        };
        return layer(x, weight, bias, Linear { uploaded: Some(known), ..Linear::default() });
    }
    let values = match known {
        None => vec![0.0; shape[0] * shape[1]],
        Some(known) => known.values(&shape)?,
    };
    layer(x, weight, bias, Linear { known: Mutex::new(Some(values)), ..Linear::default() })
}

/// `x weight^T` in f32, also of bf16 on a GPU: its sums are not rounded.
///
/// # Errors
/// As for [`linear`].
pub(crate) fn linear_wide(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    layer(x, weight, None, Linear { wide: true, ..Linear::default() })
}

fn layer(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, op: Linear) -> Result<Tensor> {
    let ((_, width), (out, weight_width)) = (x.dims2()?, weight.dims2()?);
    if width != weight_width || bias.is_some_and(|bias| bias.dims() != [out]) {
        let bias = bias.map_or(String::new(), |bias| format!(" and bias {:?}", bias.shape()));
        bail!("linear of {:?} with weight {:?}{bias}: the shapes do not fit", x.shape(), weight.shape());
    }
    // cuBLAS is asked for rows that follow each other.
    let x = if gpu::holds(x) { x.contiguous()? } else { rows(x)? };
    let weight = weight.contiguous()?;
    match bias {
        None => tape::apply(op, [&x, &weight], Reads::Inputs),
        Some(bias) => tape::apply(op, [&x, &weight, &bias.contiguous()?], Reads::Inputs),
    }
}

#[derive(Default)]
struct Linear {
    /// The result, if it was computed before.
    known: Mutex<Option<Vec<f32>>>,
    /// The same on a GPU.
    uploaded: Option<Tensor>,
    /// The result is f32 whatever the type of x and weight.
    wide: bool,
}

impl Linear {
    fn known(&self) -> Option<Vec<f32>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The result on a GPU, without a bias unless it is known.
    fn on_gpu(&self, x: &CudaStorage, x_at: &Layout, w: &CudaStorage, w_at: &Layout) -> Result<(CudaStorage, Shape)> {
        let ((tokens, width), outs) = (x_at.shape().dims2()?, w_at.shape().dim(0)?);
        match &self.uploaded {
            Some(known) => gpu::copied(known),
            None if tokens * outs * width == 0 => {
                let (zeros, shape) = gpu::zeros(x, (tokens, outs))?;
                let to = if self.wide { DType::F32 } else { x.dtype() };
                Ok((gpu::converted(&zeros, &Layout::contiguous(&shape), to)?, shape))
            }
            #[cfg(feature = "cuda")]
            None if self.wide && x.dtype() == DType::BF16 => {
                let shape = Shape::from((tokens, outs));
                let mut out = gpu::operand::unwritten(x.device(), &shape, DType::F32)?;
                let to = gpu::product::Output { of: &mut out, first: 0 };
                gpu::product::product((x, x_at), (w, &w_at.transpose(0, 1)?), to, Into::Fresh)?;
                Ok((out, shape))
            }
            None => {
                let product = x.matmul(w, (1, tokens, outs, width), x_at, &w_at.transpose(0, 1)?)?;
                Ok((product, Shape::from((tokens, outs))))
            }
        }
    }

    fn backward(x: &Tensor, weight: &Tensor, d_out: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let ((tokens, width), outs) = (x.dims2()?, weight.dim(0)?);
        let d_out = cast(&d_out.contiguous()?, x.dtype())?;
        if gpu::holds(x) {
            // Without the graphs of x and weight, which the gradients would hold.
            let dx = x.track_op().then(|| d_out.matmul(&weight.detach())).transpose()?;
            let dw = weight.track_op().then(|| d_out.t()?.matmul(&x.detach())).transpose()?;
            return Ok((dx, dw));
        }
        values(&d_out, |dy| {
            let dy = Matrix::new(dy, tokens, outs);
            let of_x = |w: &[f32]| {
                let mut dx = vec![0.0; tokens * width];
                product(dy, Matrix::new(w, outs, width), &mut dx, Into::Fresh);
                Tensor::from_vec(dx, x.shape(), x.device())
            };
            let of_weight = |x: Matrix| {
                let mut dw = vec![0.0; outs * width];
                product(dy.t(), x, &mut dw, Into::Fresh);
                Tensor::from_vec(dw, weight.shape(), weight.device())
            };
            let dx = if x.track_op() { Some(values(weight, of_x)?) } else { None };
            let dw = if weight.track_op() { Some(matrix(x, of_weight)?) } else { None };
            Ok((dx, dw))
        })
    }
}

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, x: &CpuStorage, x_at: &Layout, w: &CpuStorage, w_at: &Layout) -> Result<(CpuStorage, Shape)> {
        let ((tokens, width), outs) = (x_at.shape().dims2()?, w_at.shape().dim(0)?);
        if let Some(known) = self.known() {
            return Ok((CpuStorage::F32(known), (tokens, outs).into()));
        }
        let mut out = vec![0.0; tokens * outs];
        product(cpu_matrix(x, x_at)?, Matrix::new(cpu(w, w_at)?, outs, width).t(), &mut out, Into::Fresh);
        Ok((CpuStorage::F32(out), (tokens, outs).into()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, x_at: &Layout, w: &CudaStorage, w_at: &Layout) -> Result<(CudaStorage, Shape)> {
        self.on_gpu(x, x_at, w, w_at)
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _out: &Tensor, d_out: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Self::backward(x, w, d_out)
    }
}

impl CustomOp3 for Linear {
    fn name(&self) -> &'static str {
        "linear with bias"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_at: &Layout,
        w: &CpuStorage,
        w_at: &Layout,
        b: &CpuStorage,
        b_at: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let ((tokens, width), bias) = (x_at.shape().dims2()?, cpu(b, b_at)?);
        if let Some(known) = self.known() {
            return Ok((CpuStorage::F32(known), (tokens, bias.len()).into()));
        }
        let mut out = bias.repeat(tokens);
        product(cpu_matrix(x, x_at)?, Matrix::new(cpu(w, w_at)?, bias.len(), width).t(), &mut out, Into::Sum);
        Ok((CpuStorage::F32(out), (tokens, bias.len()).into()))
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_at: &Layout,
        w: &CudaStorage,
        w_at: &Layout,
        b: &CudaStorage,
        b_at: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (out, shape) = self.on_gpu(x, x_at, w, w_at)?;
        if self.uploaded.is_some() || shape.elem_count() == 0 {
            return Ok((out, shape));
        }
        let sum = out.binary_impl::<op::Add>(b, &Layout::contiguous(&shape), &b_at.broadcast_as(&shape)?)?;
        Ok((sum, shape))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        b: &Tensor,
        _out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (dx, dw) = Self::backward(x, w, d_out)?;
        let db = if b.track_op() { Some(d_out.sum(0)?) } else { None };
        Ok((dx, dw, db))
    }
}
