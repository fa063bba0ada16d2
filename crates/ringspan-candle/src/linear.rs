//! A linear layer as one operation with a backward pass.

use crate::cast::{cast, sum_of_rows};
use crate::gpu;
use crate::matmul::{Matrix, product_new};
use crate::number::{self, Number, with_number};
use crate::slices::{elements, elements_of, matrix_of, rows, widened, with_matrix};
use crate::stored_activation::StoredActivation;
use crate::tape::{self, Reads};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Tensor, bail, op};
use std::sync::{Mutex, PoisonError};

/// `x weight^T + bias`: x `[T, in]`, weight `[out, in]`, bias `[out]` to `[T, out]`. All are f32 or all bf16; products are
/// summed in f32 and rounded once.
///
/// The rows of x may lie apart in memory (columns of a wider tensor); nothing is transposed in memory.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan_candle::linear::linear;
///
/// let x = Tensor::new(&[[1f32, 2.0]], &Device::Cpu)?;
/// let weight = Tensor::new(&[[3f32, 4.0], [5.0, 6.0], [0.0, 1.0]], &Device::Cpu)?;
/// assert_eq!(linear(&x, &weight, None)?.to_vec2::<f32>()?, [[11.0, 17.0, 2.0]]);
/// # Ok::<_, candle_core::Error>(())
/// ```
///
/// # Errors
/// Other types and shapes.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    layer(x, weight, bias, Linear::default())
}

/// Like [`linear`], for the second pass of a recomputed layer: the output is the stored one, `known`, or zeros if nothing
/// reads its values, and no product is computed. x and the weights must equal those of the first pass.
///
/// # Errors
/// As for [`linear`], and a stored output of another shape.
pub fn linear_recomputed(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    known: Option<StoredActivation>,
) -> Result<Tensor> {
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

/// `x weight^T` in f32, also for bf16 inputs: its sums are not rounded.
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
    // The products of candle on a GPU need contiguous rows.
    let x = if gpu::holds(x) { x.contiguous()? } else { rows(x)? };
    let weight = weight.contiguous()?;
    match bias {
        None => tape::apply(op, [&x, &weight], Reads::Inputs),
        Some(bias) => tape::apply(op, [&x, &weight, &bias.contiguous()?], Reads::Inputs),
    }
}

#[derive(Default)]
struct Linear {
    /// The output on the CPU, if this is a recomputation.
    known: Mutex<Option<Vec<f32>>>,
    /// The output on a GPU, if this is a recomputation.
    uploaded: Option<Tensor>,
    /// Whether the output is f32, whatever the type of x and weight.
    wide: bool,
}

impl Linear {
    fn known(&self) -> Option<Vec<f32>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The output on a GPU; the bias is not added, but is part of a stored output.
    fn on_gpu(&self, x: &CudaStorage, x_at: &Layout, w: &CudaStorage, w_at: &Layout) -> Result<(CudaStorage, Shape)> {
        let ((tokens, width), outs) = (x_at.shape().dims2()?, w_at.shape().dim(0)?);
        match &self.uploaded {
            Some(known) => gpu::copied(known),
            None if tokens * outs * width == 0 => {
                let (zeros, shape) = gpu::zeros(x, (tokens, outs))?;
                let to = if self.wide { DType::F32 } else { x.dtype() };
                Ok((gpu::converted(&zeros, &Layout::contiguous(&shape), to)?, shape))
            }
            None if self.wide && x.dtype() == DType::BF16 => {
                let shape = Shape::from((tokens, outs));
                let out = gpu::product::wide((x, x_at), (w, &w_at.transpose(0, 1)?), &shape)?;
                Ok((out, shape))
            }
            None => {
                let product = x.matmul(w, (1, tokens, outs, width), x_at, &w_at.transpose(0, 1)?)?;
                Ok((product, Shape::from((tokens, outs))))
            }
        }
    }

    /// The stored output, in the type of the layer's output.
    fn stored(&self, known: Vec<f32>, x: &CpuStorage) -> Result<CpuStorage> {
        number::storage(known, if self.wide { DType::F32 } else { x.dtype() })
    }

    /// Computes the output on the CPU, where x and weight are stored as `T`.
    fn forward<T: Number>(&self, x: Matrix<T>, w: Matrix<T>, bias: Option<&[f32]>) -> CpuStorage {
        match self.wide {
            true => CpuStorage::F32(product_new(x, w.t(), bias)),
            false => T::to_cpu_storage_owned(T::product_new(x, w.t(), bias)),
        }
    }

    fn backward(x: &Tensor, weight: &Tensor, d_out: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let ((tokens, width), outs) = (x.dims2()?, weight.dim(0)?);
        let d_out = cast(&d_out.contiguous()?, x.dtype())?;
        if gpu::holds(x) {
            // Detached, since gradients would otherwise keep the graphs of x and weight alive.
            let dx = x.track_op().then(|| d_out.matmul(&weight.detach())).transpose()?;
            let dw = weight.track_op().then(|| d_out.t()?.matmul(&x.detach())).transpose()?;
            return Ok((dx, dw));
        }
        with_number!(x.dtype(), T => elements_of::<T, _>(&d_out, |dy| {
            let dy = Matrix::new(dy, tokens, outs);
            let of_x = |w: &[T]| {
                Tensor::from_vec(T::product_new(dy, Matrix::new(w, outs, width), None), x.shape(), x.device())
            };
            let of_weight = |x: Matrix<T>| {
                Tensor::from_vec(T::product_new(dy.t(), x, None), weight.shape(), weight.device())
            };
            let dx = if x.track_op() { Some(elements_of(weight, of_x)?) } else { None };
            let dw = if weight.track_op() { Some(with_matrix(x, of_weight)?) } else { None };
            Ok((dx, dw))
        }))
    }
}

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, x: &CpuStorage, x_at: &Layout, w: &CpuStorage, w_at: &Layout) -> Result<(CpuStorage, Shape)> {
        let ((tokens, width), outs) = (x_at.shape().dims2()?, w_at.shape().dim(0)?);
        let out = match self.known() {
            Some(known) => self.stored(known, x)?,
            None => with_number!(x.dtype(), T => {
                self.forward::<T>(matrix_of(x, x_at)?, Matrix::new(elements(w, w_at)?, outs, width), None)
            }),
        };
        Ok((out, (tokens, outs).into()))
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
        let ((tokens, width), bias) = (x_at.shape().dims2()?, widened(b, b_at)?);
        let out = match self.known() {
            Some(known) => self.stored(known, x)?,
            None => with_number!(x.dtype(), T => {
                let w = Matrix::new(elements(w, w_at)?, bias.len(), width);
                self.forward::<T>(matrix_of(x, x_at)?, w, Some(&bias))
            }),
        };
        Ok((out, (tokens, bias.len()).into()))
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
        let db = if b.track_op() { Some(cast(&sum_of_rows(d_out)?, b.dtype())?) } else { None };
        Ok((dx, dw, db))
    }
}
