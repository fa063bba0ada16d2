//! Takes a rank's partition (tensor or expert parallelism) out of a parameter that is in memory as a whole.

use crate::quantized::{QuantizedMatrix, QuantizedStack};
use crate::shard::Partition;
use crate::weight::Weight;
use candle_core::{Result, Tensor, bail};
use std::ops::Range;

impl Weight {
    /// A partition of this whole parameter, in the same format. Rows of matrices, and whole experts, share their memory with the whole
    /// parameter, unless `copy` asks for memory of their own; columns are always copied.
    ///
    /// # Errors
    /// A partition of another shape, and columns of a quantized matrix that do not begin and end between blocks.
    pub fn partition(&self, partition: &Partition, copy: bool) -> Result<Self> {
        if self.dims() != partition.whole {
            bail!(
                "{} has shape {:?}, and a partition of {:?} is asked for",
                partition.name,
                self.dims(),
                partition.whole
            );
        }
        let Partition { rows, columns, .. } = partition;
        Ok(match self {
            Self::Dense(tensor) => {
                let matrix = tensor.reshape(((), partition.width()))?;
                let part = matrix.narrow(0, rows.start, rows.len())?.narrow(1, columns.start, columns.len())?;
                let part = if copy { part.copy()? } else { part.contiguous()? };
                part.reshape(partition.shape())?.into()
            }
            Self::Quantized(matrix) => {
                let part = matrix.rows(rows.clone())?.columns(columns.clone())?;
                if copy { part.copied() } else { part }.into()
            }
            Self::Stack(stack) => stack_partition(stack, partition, copy)?.into(),
        })
    }

    /// This partition of a parameter with another one of the same format below it.
    ///
    /// # Errors
    /// Partitions of different formats or widths, and stacks of experts.
    pub fn above(&self, below: &Self) -> Result<Self> {
        match (self, below) {
            (Self::Dense(above), Self::Dense(below)) => Ok(Tensor::cat(&[above, below], 0)?.into()),
            (Self::Quantized(above), Self::Quantized(below)) => {
                Ok(QuantizedMatrix::concat_rows(&[above.clone(), below.clone()])?.into())
            }
            _ => bail!("shape {:?} below shape {:?}: these are no rows of one matrix", below.dims(), self.dims()),
        }
    }
}

/// Some experts of a parameter `[e, in, out]`, or some rows or columns of their matrices, which are stored as `[out, in]`.
fn stack_partition(stack: &QuantizedStack, partition: &Partition, copy: bool) -> Result<QuantizedStack> {
    let [_, inputs, outputs] = stack.dims();
    let (experts, rows, columns) = match partition.dim {
        2 => (groups(&partition.rows, inputs), partition.columns.clone(), 0..inputs),
        _ => (partition.rows.clone(), 0..outputs, groups(&partition.columns, outputs)),
    };
    if rows.len() == outputs && columns.len() == inputs {
        let part = stack.matrix().rows(experts.start * outputs..experts.end * outputs)?;
        return QuantizedStack::new(if copy { part.copied() } else { part }, outputs);
    }
    let of_expert = |expert| stack.get(expert)?.rows(rows.clone())?.columns(columns.clone());
    let parts = experts.map(of_expert).collect::<Result<Vec<_>>>()?;
    QuantizedStack::new(QuantizedMatrix::concat_rows(&parts)?, rows.len())
}

/// A range of elements as a range of groups of `each` elements.
fn groups(range: &Range<usize>, each: usize) -> Range<usize> {
    range.start / each.max(1)..range.end / each.max(1)
}
