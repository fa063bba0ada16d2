//! A linear layer with a quantized weight, as one operation with a backward pass.

use super::dots;
use super::input::Input;
use super::int16::{self, Unpacking};
use super::matrix::QuantizedMatrix;
use super::tiles;
use crate::activation_dtype::ActivationDType;
use crate::matmul::{Output, arithmetic};
use crate::pool;
use crate::slices::{cpu, rows, values};
use crate::stored_activation::StoredActivation;
use crate::tape::{self, Reads};
use candle_core::{CpuStorage, CustomOp1, CustomOp2, DType, Layout, Result, Shape, Tensor, bail};
use ringspan::kernel::product::MOST_PACKED;
use std::sync::{Mutex, PoisonError};

/// `x weight^T + bias` on the CPU: x `[T, in]`, weight `[out, in]`, bias `[out]` to `[T, out]`, f32. Differentiable in x and
/// in the bias; the weight is frozen.
///
/// The rows of x may lie apart in memory (columns of a wider tensor). All arithmetic is f32, unless the weight rounds activations
/// ([`QuantizedMatrix::rounding_activations`]). At most a few MiB of the weight are dequantized at a time. The product is computed on
/// the threads of the caller's pool ([`pool`](crate::pool)).
///
/// # Errors
/// Other types, shapes and devices.
pub fn linear_quantized(x: &Tensor, weight: &QuantizedMatrix, bias: Option<&Tensor>) -> Result<Tensor> {
    layer(x, weight, bias, None)
}

/// Like [`linear_quantized`], for the second pass of a recomputed layer: the output is the stored one, `known`, or zeros if
/// nothing reads its values, and no product is computed. x must equal that of the first pass.
///
/// # Errors
/// As for [`linear_quantized`], and a stored output of another shape.
pub fn linear_quantized_recomputed(
    x: &Tensor,
    weight: &QuantizedMatrix,
    bias: Option<&Tensor>,
    known: Option<StoredActivation>,
) -> Result<Tensor> {
    let shape = [x.dim(0)?, weight.dims().0];
    let known = known.map_or_else(|| Ok(vec![0.0; shape[0] * shape[1]]), |known| known.values(&shape))?;
    layer(x, weight, bias, Some(known))
}

/// The number of f32 values that a product with a matrix of `rows` x `columns` needs in addition to factors and results: a part of the
/// matrix, dequantized and packed.
#[must_use]
pub fn forward_scratch(rows: usize, columns: usize) -> usize {
    rows.saturating_mul(columns).min(MOST_PACKED)
}

/// Writes `x weight^T`: x `[T, in]`, weight `[out, in]`, out `[T, out]`, row by row.
pub(crate) fn product_quantized_t(x: &[f32], weight: &QuantizedMatrix, out: &mut [f32]) {
    let width = weight.dims().1;
    let x = Input::new(x, x.len() / width.max(1), width);
    if is_dequantized(x.tokens, weight) {
        return arithmetic().product_quantized_t(x.matrix(), weight, Output::Overwrite(out));
    }
    out.fill(0.0);
    add_few_or_rounded(x, weight, out);
}

/// Writes `dy weight`: dy `[T, out]`, weight `[out, in]`, dx `[T, in]`, row by row.
pub(crate) fn product_quantized(dy: &[f32], weight: &QuantizedMatrix, dx: &mut [f32]) {
    let outs = weight.dims().0;
    tiles::backward(Input::new(dy, dy.len() / outs.max(1), outs), weight, dx);
}

/// Whether products with this many tokens dequantize the weight while they pack it, and then multiply like those with an f32 weight.
fn is_dequantized(tokens: usize, weight: &QuantizedMatrix) -> bool {
    tokens > dots::MAX_TOKENS && unpacking(weight).is_none()
}

/// How the weight is unpacked if activations are rounded to 16-bit integers and its format is integers, too.
fn unpacking(weight: &QuantizedMatrix) -> Option<Unpacking> {
    Unpacking::of(weight.format()).filter(|_| weight.activations() == ActivationDType::Int16)
}

/// Adds `x weight^T` to `out`, with few tokens or with rounded activations.
fn add_few_or_rounded(x: Input, weight: &QuantizedMatrix, out: &mut [f32]) {
    match unpacking(weight) {
        Some(unpacking) => int16::add_forward(x, weight, unpacking, out),
        None => dots::add_forward(x, weight, out),
    }
}

/// `x weight^T + bias`.
fn product(x: Input, weight: &QuantizedMatrix, bias: Option<&[f32]>) -> Vec<f32> {
    if is_dequantized(x.tokens, weight) {
        return arithmetic().product_new_quantized_t(x.matrix(), weight, bias);
    }
    let mut out = bias.map_or_else(|| pool::zeros(x.tokens * weight.dims().0), |bias| bias.repeat(x.tokens));
    add_few_or_rounded(x, weight, &mut out);
    out
}

fn layer(x: &Tensor, weight: &QuantizedMatrix, bias: Option<&Tensor>, known: Option<Vec<f32>>) -> Result<Tensor> {
    let ((_, width), (outs, weight_width)) = (x.dims2()?, weight.dims());
    if width != weight_width || bias.is_some_and(|bias| bias.dims() != [outs]) {
        let bias = bias.map_or(String::new(), |bias| format!(" and bias {:?}", bias.shape()));
        bail!("linear of {:?} with weight {weight:?}{bias}: the shapes do not fit", x.shape());
    }
    for (what, tensor) in [("x", Some(x)), ("a bias", bias)] {
        if let Some(tensor) = tensor.filter(|tensor| !tensor.device().is_cpu() || tensor.dtype() != DType::F32) {
            let (dtype, device) = (tensor.dtype(), tensor.device().location());
            bail!("a quantized weight is multiplied in f32 on the CPU, given {what} of {dtype:?} on {device:?}");
        }
    }
    let op = Linear { weight: weight.clone(), known: Mutex::new(known) };
    match bias {
        None => tape::apply(op, [&rows(x)?], Reads::Nothing),
        Some(bias) => tape::apply(op, [&rows(x)?, &bias.contiguous()?], Reads::Nothing),
    }
}

struct Linear {
    weight: QuantizedMatrix,
    /// The output, if this is a recomputation.
    known: Mutex<Option<Vec<f32>>>,
}

impl Linear {
    fn forward(&self, x: &CpuStorage, x_at: &Layout, bias: Option<&[f32]>) -> Result<(CpuStorage, Shape)> {
        let x = Input::read(x, x_at)?;
        let shape = Shape::from((x.tokens, self.weight.dims().0));
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).take();
        Ok((CpuStorage::F32(known.unwrap_or_else(|| product(x, &self.weight, bias))), shape))
    }

    fn backward(&self, x: &Tensor, d_out: &Tensor) -> Result<Option<Tensor>> {
        if !x.track_op() {
            return Ok(None);
        }
        let (tokens, outs) = d_out.dims2()?;
        let mut dx = pool::zeros(tokens * self.weight.dims().1);
        values(&d_out.contiguous()?, |dy| {
            tiles::backward(Input::new(dy, tokens, outs), &self.weight, &mut dx);
            Ok(())
        })?;
        Tensor::from_vec(dx, x.shape(), x.device()).map(Some)
    }
}

impl CustomOp1 for Linear {
    fn name(&self) -> &'static str {
        "quantized linear"
    }

    fn cpu_fwd(&self, x: &CpuStorage, x_at: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward(x, x_at, None)
    }

    fn bwd(&self, x: &Tensor, _out: &Tensor, d_out: &Tensor) -> Result<Option<Tensor>> {
        self.backward(x, d_out)
    }
}

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "quantized linear with bias"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_at: &Layout,
        bias: &CpuStorage,
        bias_at: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward(x, x_at, Some(cpu(bias, bias_at)?))
    }

    fn bwd(
        &self,
        x: &Tensor,
        bias: &Tensor,
        _out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let d_bias = if bias.track_op() { Some(d_out.sum(0)?) } else { None };
        Ok((self.backward(x, d_out)?, d_bias))
    }
}
