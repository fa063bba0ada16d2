//! A parameter's values, as a layer is given them.

use crate::cast::cast;
use crate::kept::Kept;
use crate::linear::{linear, linear_again, linear_wide};
use crate::quantized::{Format, QuantizedMatrix, QuantizedStack, linear_quantized, linear_quantized_again};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::ops::Range;

/// The values of a parameter: a tensor, or frozen matrices that stay in memory as their file stores them.
///
/// Clones share the values.
#[derive(Debug, Clone)]
pub enum Weight {
    /// f32, or bf16 where models compute in it.
    Dense(Tensor),
    /// A matrix on the CPU. Products with it decode a tile of it at a time, and it gets no gradient.
    Quantized(QuantizedMatrix),
    /// The matrices of a layer's experts on the CPU, one parameter `[e, in, out]`. Experts multiply with them as with the above.
    Stack(QuantizedStack),
}

impl From<Tensor> for Weight {
    fn from(tensor: Tensor) -> Self {
        Self::Dense(tensor)
    }
}

impl From<QuantizedMatrix> for Weight {
    fn from(matrix: QuantizedMatrix) -> Self {
        Self::Quantized(matrix)
    }
}

impl From<QuantizedStack> for Weight {
    fn from(stack: QuantizedStack) -> Self {
        Self::Stack(stack)
    }
}

impl Weight {
    /// Its shape.
    #[must_use]
    pub fn dims(&self) -> Vec<usize> {
        match self {
            Self::Dense(tensor) => tensor.dims().to_vec(),
            Self::Quantized(matrix) => <[usize; 2]>::from(matrix.dims()).to_vec(),
            Self::Stack(stack) => stack.dims().to_vec(),
        }
    }

    /// Where it is.
    #[must_use]
    pub fn device(&self) -> &Device {
        match self {
            Self::Dense(tensor) => tensor.device(),
            Self::Quantized(_) | Self::Stack(_) => &Device::Cpu,
        }
    }

    /// The type in which layers compute with it.
    #[must_use]
    pub fn computed_in(&self) -> DType {
        match self {
            Self::Dense(tensor) => tensor.dtype(),
            Self::Quantized(matrix) => matrix.computed_in().dtype(),
            Self::Stack(stack) => stack.matrix().computed_in().dtype(),
        }
    }

    /// Bytes of its values.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Dense(tensor) => tensor.elem_count() * tensor.dtype().size_in_bytes(),
            Self::Quantized(matrix) => matrix.bytes().len(),
            Self::Stack(stack) => stack.matrix().bytes().len(),
        }
    }

    /// How its numbers are stored, where it is no tensor.
    #[must_use]
    pub fn format(&self) -> Option<Format> {
        match self {
            Self::Dense(_) => None,
            Self::Quantized(matrix) => Some(matrix.format()),
            Self::Stack(stack) => Some(stack.matrix().format()),
        }
    }

    /// The tensor that it is, if it is one.
    #[must_use]
    pub fn dense(&self) -> Option<&Tensor> {
        match self {
            Self::Dense(tensor) => Some(tensor),
            Self::Quantized(_) | Self::Stack(_) => None,
        }
    }

    /// The tensor that it is.
    ///
    /// # Errors
    /// Matrices that are quantized.
    pub fn tensor(&self) -> Result<&Tensor> {
        match self {
            Self::Dense(tensor) => Ok(tensor),
            Self::Quantized(matrix) => bail!("a tensor is needed here, and this is {matrix:?}"),
            Self::Stack(stack) => bail!("a tensor is needed here, and this is {stack:?}"),
        }
    }

    /// Its values as a tensor: those of quantized matrices are decoded to f32, a copy of all of them.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn to_tensor(&self) -> Result<Tensor> {
        match self {
            Self::Dense(tensor) => Ok(tensor.clone()),
            Self::Quantized(matrix) => matrix.dequantize(),
            Self::Stack(stack) => stack.dequantize(0..stack.dims()[0]),
        }
    }

    /// Some of its rows, of a stack some of its experts, in f32 where it is quantized.
    ///
    /// # Errors
    /// Rows that are not there.
    pub fn rows(&self, range: Range<usize>) -> Result<Tensor> {
        match self {
            Self::Dense(tensor) => tensor.narrow(0, range.start, range.len()),
            Self::Quantized(matrix) => matrix.rows(range)?.dequantize(),
            Self::Stack(stack) => stack.dequantize(range),
        }
    }

    /// The same without a graph of what it is computed from.
    #[must_use]
    pub fn detach(&self) -> Self {
        match self {
            Self::Dense(tensor) => Self::Dense(tensor.detach()),
            Self::Quantized(_) | Self::Stack(_) => self.clone(),
        }
    }

    /// `x weight^T + bias`: x `[T, in]`, weight `[out, in]`, bias `[out]` to `[T, out]`, in the type of x.
    ///
    /// # Errors
    /// Shapes, types and devices that do not fit.
    pub fn linear(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match self {
            Self::Dense(weight) => linear(x, weight, bias),
            Self::Quantized(weight) => in_f32(x, bias, |x, bias| linear_quantized(x, weight, bias)),
            Self::Stack(_) => self.one_matrix(),
        }
    }

    /// The same for a layer that was computed before: its values are `known`, or zeros where nothing looks at them, and cost no
    /// product.
    ///
    /// # Errors
    /// As for [`linear`](Self::linear); something known of another shape.
    pub(crate) fn linear_again(&self, x: &Tensor, bias: Option<&Tensor>, known: Option<Kept>) -> Result<Tensor> {
        match self {
            Self::Dense(weight) => linear_again(x, weight, bias, known),
            Self::Quantized(weight) => in_f32(x, bias, |x, bias| linear_quantized_again(x, weight, bias, known)),
            Self::Stack(_) => self.one_matrix(),
        }
    }

    /// `x weight^T` in f32, whatever the type of x.
    ///
    /// # Errors
    /// As for [`linear`](Self::linear).
    pub(crate) fn linear_wide(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(weight) => linear_wide(x, weight),
            Self::Quantized(weight) => linear_quantized(&cast(x, DType::F32)?, weight, None),
            Self::Stack(_) => self.one_matrix(),
        }
    }

    /// Rows `[rows.len(), columns]` by their numbers, in the type in which layers compute with it.
    ///
    /// # Errors
    /// Rows that are not there.
    pub fn lookup(&self, rows: &[u32]) -> Result<Tensor> {
        match self {
            Self::Dense(table) => table.index_select(&Tensor::new(rows, table.device())?, 0),
            Self::Quantized(table) => cast(&table.dequantize_rows(rows)?, table.computed_in().dtype()),
            Self::Stack(_) => self.one_matrix(),
        }
    }

    /// Refuses the matrices of several experts where one matrix is needed.
    pub(crate) fn one_matrix<T>(&self) -> Result<T> {
        bail!("one matrix is needed here, and this has shape {:?}", self.dims())
    }
}

/// What `layer` makes of x and the bias in f32, in the type of x.
fn in_f32(
    x: &Tensor,
    bias: Option<&Tensor>,
    layer: impl FnOnce(&Tensor, Option<&Tensor>) -> Result<Tensor>,
) -> Result<Tensor> {
    let bias = bias.map(|bias| cast(bias, DType::F32)).transpose()?;
    cast(&layer(&cast(x, DType::F32)?, bias.as_ref())?, x.dtype())
}
