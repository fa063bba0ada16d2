//! The quantized matrices of a layer's experts, which are one parameter together.
//!
//! Shape letters: e experts.

use super::format::Format;
use super::matrix::QuantizedMatrix;
use crate::activation_dtype::ActivationDType;
use candle_core::{Result, Tensor, bail};
use std::fmt::{self, Debug, Formatter};
use std::ops::Range;

/// Frozen matrices in one format, which are a parameter `[e, in, out]` together.
///
/// Each matrix is stored transposed, `[out, in]`, as products need it: outputs are rows of whole blocks, and experts are
/// consecutive. Clones share the bytes.
#[derive(Clone)]
pub struct QuantizedStack {
    matrix: QuantizedMatrix,
    outputs: usize,
}

impl QuantizedStack {
    /// The experts whose matrices `[out, in]` are consecutive in `matrix` `[e out, in]`.
    ///
    /// # Errors
    /// A number of rows that is not a multiple of `outputs`.
    pub fn new(matrix: QuantizedMatrix, outputs: usize) -> Result<Self> {
        match outputs > 0 && matrix.dims().0.is_multiple_of(outputs) {
            true => Ok(Self { matrix, outputs }),
            false => bail!("{matrix:?} is no stack of matrices of {outputs} rows each"),
        }
    }

    /// The stack of a parameter `[e, in, out]` in a format of 2 bytes for each number; `read` fills its argument with the
    /// bytes of the next expert, as a tensor stores them.
    ///
    /// # Errors
    /// A format with blocks of more than one number, no outputs, and what `read` returns.
    pub fn from_tensor<E: From<candle_core::Error>>(
        format: Format,
        [experts, inputs, outputs]: [usize; 3],
        mut read: impl FnMut(&mut [u8]) -> std::result::Result<(), E>,
    ) -> std::result::Result<Self, E> {
        if (format.block_len(), format.block_bytes()) != (1, 2) {
            return Err(candle_core::Error::Msg(format!("{format} does not store a tensor in 2 bytes a number")).into());
        }
        let (mut bytes, each) = (vec![0; format.bytes(inputs, outputs)?], inputs * outputs);
        let mut stored = vec![[0; 2]; format.bytes(experts * outputs, inputs)? / 2];
        for to in stored.chunks_exact_mut(each.max(1)) {
            read(&mut bytes)?;
            transpose(bytes.as_chunks::<2>().0, to, outputs);
        }
        let matrix = QuantizedMatrix::new(format, experts * outputs, inputs, stored.into_flattened().into())?;
        Ok(Self::new(matrix, outputs)?)
    }

    /// Sets the type to which activations are rounded in products with the matrices.
    #[must_use]
    pub fn rounding_activations(self, activations: ActivationDType) -> Self {
        Self { matrix: self.matrix.rounding_activations(activations), ..self }
    }

    /// The shape `[e, in, out]` of the parameter.
    #[must_use]
    pub fn dims(&self) -> [usize; 3] {
        let (rows, inputs) = self.matrix.dims();
        [rows / self.outputs, inputs, self.outputs]
    }

    /// The matrices of all experts, `[e out, in]`.
    #[must_use]
    pub fn matrix(&self) -> &QuantizedMatrix {
        &self.matrix
    }

    /// The matrix `[out, in]` of an expert, which shares the bytes.
    ///
    /// # Errors
    /// An index beyond the experts.
    pub fn get(&self, expert: usize) -> Result<QuantizedMatrix> {
        let [experts, ..] = self.dims();
        match expert < experts {
            true => self.matrix.rows(expert * self.outputs..(expert + 1) * self.outputs),
            false => bail!("expert {expert} of {self:?}"),
        }
    }

    /// Decodes a range of experts to a tensor `[e, in, out]` of f32 on the CPU.
    ///
    /// # Errors
    /// A range beyond the experts.
    pub fn dequantize(&self, experts: Range<usize>) -> Result<Tensor> {
        let [_, inputs, outputs] = self.dims();
        let count = experts.len();
        let rows = self.matrix.rows(experts.start * outputs..experts.end * outputs)?;
        rows.dequantize()?.reshape((count, outputs, inputs))?.transpose(1, 2)?.contiguous()
    }
}

impl Debug for QuantizedStack {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let [experts, inputs, outputs] = self.dims();
        write!(f, "QuantizedStack[{experts} x {inputs} x {outputs}; {}]", self.matrix.format())
    }
}

/// Writes the transpose of a matrix with this many columns.
fn transpose(from: &[[u8; 2]], to: &mut [[u8; 2]], columns: usize) {
    /// Rows and columns that are transposed together, so that what is read and written stays in the cache.
    const TILE: usize = 32;
    let rows = from.len() / columns.max(1);
    for top in (0..rows).step_by(TILE) {
        for left in (0..columns).step_by(TILE) {
            for row in top..rows.min(top + TILE) {
                for column in left..columns.min(left + TILE) {
                    to[column * rows + row] = from[row * columns + column];
                }
            }
        }
    }
}
