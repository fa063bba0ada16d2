//! Products of an expert's rows with its matrices, dense or quantized, in f32 and without a graph.
//!
//! Shape letters: n tokens of the expert.

use crate::cast::cast;
use crate::quantized::{QuantizedMatrix, linear_quantized, product_quantized};
use crate::slices::values;
use crate::tensor_product::product_of;
use crate::weight::Weight;
use candle_core::{DType, Device, Result, Tensor, bail};

/// `x weight^T`: x `[n, in]`, weight `[out, in]` to `[n, out]`.
pub(super) fn through(x: &Tensor, weight: &Weight) -> Result<Tensor> {
    match weight {
        Weight::Dense(weight) => product_of(x, &weight.t()?),
        Weight::Quantized(weight) => linear_quantized(&cast(x, DType::F32)?, weight, None),
        Weight::Stack(_) => weight.expected_one_matrix(),
    }
}

/// The gradient of x for [`through`], `dy weight`: dy `[n, out]` to `[n, in]`.
pub(super) fn back_through(dy: &Tensor, weight: &Weight) -> Result<Tensor> {
    match weight {
        Weight::Dense(weight) => product_of(dy, weight),
        Weight::Quantized(weight) => back_through_stored(dy, weight),
        Weight::Stack(_) => weight.expected_one_matrix(),
    }
}

/// The product of x `[n, in]` with the matrix of one expert of a stack `[e, in, out]`: `[n, out]`.
pub(super) fn through_one(x: &Tensor, stack: &Weight, expert: usize) -> Result<Tensor> {
    match stack {
        Weight::Dense(stack) => product_of(x, &stack.get(expert)?),
        Weight::Stack(stack) => linear_quantized(&cast(x, DType::F32)?, &stack.get(expert)?, None),
        Weight::Quantized(matrix) => bail!("matrices of several experts are needed here, and this is {matrix:?}"),
    }
}

/// The gradient of x for [`through_one`]: dy `[n, out]` to `[n, in]`.
pub(super) fn back_through_one(dy: &Tensor, stack: &Weight, expert: usize) -> Result<Tensor> {
    match stack {
        Weight::Dense(stack) => product_of(dy, &stack.get(expert)?.t()?),
        Weight::Stack(stack) => back_through_stored(dy, &stack.get(expert)?),
        Weight::Quantized(matrix) => bail!("matrices of several experts are needed here, and this is {matrix:?}"),
    }
}

fn back_through_stored(dy: &Tensor, weight: &QuantizedMatrix) -> Result<Tensor> {
    let ((tokens, outputs), (rows, columns)) = (dy.dims2()?, weight.dims());
    if outputs != rows {
        bail!("a gradient {:?} does not fit the outputs of {weight:?}", dy.shape());
    }
    let mut dx = vec![0.0; tokens * columns];
    values(&cast(&dy.contiguous()?, DType::F32)?, |dy| {
        product_quantized(dy, weight, &mut dx);
        Ok(())
    })?;
    Tensor::from_vec(dx, (tokens, columns), &Device::Cpu)
}
