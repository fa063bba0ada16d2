//! The values of a parameter in the forms in which layers can compute with them.

use crate::activation_dtype::ActivationDType;
use crate::cast::cast;
use crate::linear::{linear, linear_recomputed, linear_wide};
use crate::quantized::{Format, QuantizedMatrix, QuantizedStack, linear_quantized, linear_quantized_recomputed};
use crate::stored_activation::StoredActivation;
use candle_core::{DType, Device, Result, Tensor, bail};
use std::ops::Range;

/// The values of a parameter: a tensor, or frozen matrices that stay in memory as their file stores them.
///
/// Clones share the values.
#[derive(Debug, Clone)]
pub enum Weight {
    /// f32, or bf16 where models compute in it.
    Dense(Tensor),
    /// A matrix on the CPU. Products with it decode a tile of it at a time; it has no gradient.
    Quantized(QuantizedMatrix),
    /// The quantized matrices of a layer's experts on the CPU, one parameter `[e, in, out]`. Products decode a tile of an
    /// expert's matrix at a time; it has no gradient.
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
    /// The shape of the parameter.
    #[must_use]
    pub fn dims(&self) -> Vec<usize> {
        match self {
            Self::Dense(tensor) => tensor.dims().to_vec(),
            Self::Quantized(matrix) => <[usize; 2]>::from(matrix.dims()).to_vec(),
            Self::Stack(stack) => stack.dims().to_vec(),
        }
    }

    /// The device of the values.
    #[must_use]
    pub fn device(&self) -> &Device {
        match self {
            Self::Dense(tensor) => tensor.device(),
            Self::Quantized(_) | Self::Stack(_) => &Device::Cpu,
        }
    }

    /// The type in which layers compute with this parameter.
    #[must_use]
    pub fn computed_in(&self) -> DType {
        match self {
            Self::Dense(tensor) => tensor.dtype(),
            Self::Quantized(matrix) => matrix.computed_in().dtype(),
            Self::Stack(stack) => stack.matrix().computed_in().dtype(),
        }
    }

    /// Memory of the values in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Dense(tensor) => tensor.elem_count() * tensor.dtype().size_in_bytes(),
            Self::Quantized(matrix) => matrix.bytes().len(),
            Self::Stack(stack) => stack.matrix().bytes().len(),
        }
    }

    /// The format of quantized values; `None` for a tensor.
    #[must_use]
    pub fn format(&self) -> Option<Format> {
        match self {
            Self::Dense(_) => None,
            Self::Quantized(matrix) => Some(matrix.format()),
            Self::Stack(stack) => Some(stack.matrix().format()),
        }
    }

    /// The tensor, if the values are one.
    #[must_use]
    pub fn dense(&self) -> Option<&Tensor> {
        match self {
            Self::Dense(tensor) => Some(tensor),
            Self::Quantized(_) | Self::Stack(_) => None,
        }
    }

    /// The tensor.
    ///
    /// # Errors
    /// Quantized matrices.
    pub fn tensor(&self) -> Result<&Tensor> {
        match self {
            Self::Dense(tensor) => Ok(tensor),
            Self::Quantized(matrix) => bail!("a tensor is needed here, and this is {matrix:?}"),
            Self::Stack(stack) => bail!("a tensor is needed here, and this is {stack:?}"),
        }
    }

    /// The values as a tensor: quantized matrices are decoded to f32, a copy of all of them.
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

    /// A range of the matrix's rows, or of a stack's experts, as a tensor; quantized values are decoded to f32.
    ///
    /// # Errors
    /// A range beyond the rows.
    pub fn rows(&self, range: Range<usize>) -> Result<Tensor> {
        match self {
            Self::Dense(tensor) => tensor.narrow(0, range.start, range.len()),
            Self::Quantized(matrix) => matrix.rows(range)?.dequantize(),
            Self::Stack(stack) => stack.dequantize(range),
        }
    }

    /// A range of the matrix's rows, which shares the values.
    ///
    /// # Errors
    /// A range beyond the rows, and a stack of matrices.
    pub(crate) fn row_range(&self, range: Range<usize>) -> Result<Self> {
        match self {
            Self::Dense(tensor) => Ok(Self::Dense(tensor.narrow(0, range.start, range.len())?)),
            Self::Quantized(matrix) => Ok(Self::Quantized(matrix.rows(range)?)),
            Self::Stack(_) => self.expected_one_matrix(),
        }
    }

    /// The same values without the graph that computed them.
    #[must_use]
    pub fn detach(&self) -> Self {
        match self {
            Self::Dense(tensor) => Self::Dense(tensor.detach()),
            Self::Quantized(_) | Self::Stack(_) => self.clone(),
        }
    }

    /// Sets the type to which activations are rounded in products with quantized values; tensors stay as they are.
    #[must_use]
    pub fn rounding_activations(self, activations: ActivationDType) -> Self {
        match self {
            Self::Dense(tensor) => Self::Dense(tensor),
            Self::Quantized(matrix) => Self::Quantized(matrix.rounding_activations(activations)),
            Self::Stack(stack) => Self::Stack(stack.rounding_activations(activations)),
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
            Self::Stack(_) => self.expected_one_matrix(),
        }
    }

    /// Like [`linear`](Self::linear), for the second pass of a recomputed layer: the output is the stored one, `known`, or
    /// zeros if nothing reads its values, and no product is computed.
    ///
    /// # Errors
    /// As for [`linear`](Self::linear), and a stored output of another shape.
    pub(crate) fn linear_recomputed(
        &self,
        x: &Tensor,
        bias: Option<&Tensor>,
        known: Option<StoredActivation>,
    ) -> Result<Tensor> {
        match self {
            Self::Dense(weight) => linear_recomputed(x, weight, bias, known),
            Self::Quantized(weight) => in_f32(x, bias, |x, bias| linear_quantized_recomputed(x, weight, bias, known)),
            Self::Stack(_) => self.expected_one_matrix(),
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
            Self::Stack(_) => self.expected_one_matrix(),
        }
    }

    /// The rows with these indices, `[rows.len(), columns]`, in the type in which layers compute with the parameter.
    ///
    /// # Errors
    /// Indices beyond the rows.
    pub fn lookup(&self, rows: &[u32]) -> Result<Tensor> {
        match self {
            Self::Dense(table) => table.index_select(&Tensor::new(rows, table.device())?, 0),
            Self::Quantized(table) => cast(&table.dequantize_rows(rows)?, table.computed_in().dtype()),
            Self::Stack(_) => self.expected_one_matrix(),
        }
    }

    /// Returns an error which says that these are the matrices of several experts, where one matrix is needed.
    pub(crate) fn expected_one_matrix<T>(&self) -> Result<T> {
        bail!("one matrix is needed here, and this has shape {:?}", self.dims())
    }
}

/// Calls `layer` with x and the bias in f32, and converts its output to the type of x.
fn in_f32(
    x: &Tensor,
    bias: Option<&Tensor>,
    layer: impl FnOnce(&Tensor, Option<&Tensor>) -> Result<Tensor>,
) -> Result<Tensor> {
    let bias = bias.map(|bias| cast(bias, DType::F32)).transpose()?;
    cast(&layer(&cast(x, DType::F32)?, bias.as_ref())?, x.dtype())
}
