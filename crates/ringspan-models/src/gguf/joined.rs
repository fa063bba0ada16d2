//! Parameters of which files have two tensors, and those of several experts in one.
//!
//! Shape letters: e experts, H heads, L latent width, N and D widths of a head's keys without positions, and of its values.

use candle_core::{Result, Tensor, bail};
use ringspan_candle::Weight;
use ringspan_candle::quantized::{Format, QuantizedMatrix, QuantizedStack};

/// How a parameter is made of two tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joined {
    /// Rows of the first and of the second take turns, of each expert.
    Alternating,
    /// Each head is the transpose of its part of the first tensor, and behind it its part of the second.
    LatentHeads,
}

/// Both tensors as rows of their last dimension, with their shapes.
pub(super) type Both = [(Weight, Vec<usize>); 2];

impl Joined {
    /// The parameter: `[e, in, out]` of tensors `[e, out / 2, in]`, `[e, out]` of `[e, out / 2]`, or `[H (N + D), L]` of
    /// `[H, L, N]` and `[H, D, L]`. As it is stored where both tensors are so, and else in f32.
    ///
    /// # Errors
    /// Shapes that do not fit each other.
    pub(super) fn parameter(self, both: Both) -> Result<Weight> {
        let [(first, shape), (second, other)] = &both;
        match (self, &shape[..], &other[..]) {
            (Self::Alternating, &[all, wide, inputs], _) if shape == other => {
                experts(alternating(first, second)?, &[all, 2 * wide, inputs])
            }
            (Self::Alternating, &[experts, wide], _) if shape == other => {
                let both = [first.to_tensor()?, second.to_tensor()?];
                Ok(Tensor::stack(&both, 2)?.reshape((experts, 2 * wide))?.into())
            }
            (Self::LatentHeads, &[heads, latent, nope], &[of_values, value, width])
                if (heads, latent) == (of_values, width) =>
            {
                latent_heads([first, second], [heads, latent, nope, value])
            }
            _ => bail!("tensors {shape:?} and {other:?} do not fit each other"),
        }
    }
}

/// The parameter `[e, in, out]` of experts whose matrices are `[e, out, in]` in the file.
pub(super) fn experts(matrices: Weight, shape: &[usize]) -> Result<Weight> {
    let &[experts, outputs, inputs] = shape else { bail!("experts are [experts, rows, columns], given {shape:?}") };
    match matrices {
        Weight::Quantized(matrix) => Ok(QuantizedStack::new(matrix, outputs)?.into()),
        other => {
            let rows = other.to_tensor()?.reshape((experts, outputs, inputs))?;
            Ok(rows.transpose(1, 2)?.contiguous()?.into())
        }
    }
}

/// Row after row of both in turn.
fn alternating(first: &Weight, second: &Weight) -> Result<Weight> {
    if let (Weight::Quantized(first), Weight::Quantized(second)) = (first, second)
        && first.format() == second.format()
    {
        let (rows, columns) = first.dims();
        let of_row = first.format().bytes(1, columns)?.max(1);
        let both = first.bytes().chunks_exact(of_row).zip(second.bytes().chunks_exact(of_row));
        let mut bytes = Vec::with_capacity(2 * rows * of_row);
        both.for_each(|(first, second)| {
            bytes.extend_from_slice(first);
            bytes.extend_from_slice(second);
        });
        return Ok(QuantizedMatrix::new(first.format(), 2 * rows, columns, bytes.into())?.into());
    }
    let (first, second) = (first.to_tensor()?, second.to_tensor()?);
    let (rows, columns) = first.dims2()?;
    Ok(Tensor::stack(&[first, second], 1)?.reshape((2 * rows, columns))?.into())
}

/// The matrix that makes keys and values of latent vectors. Blocks of the first part lie along its other dimension, so that it can
/// be turned only where a number has its own bytes.
fn latent_heads([keys, values]: [&Weight; 2], [heads, latent, nope, value]: [usize; 4]) -> Result<Weight> {
    if let (Weight::Quantized(keys), Weight::Quantized(values)) = (keys, values)
        && keys.format() == values.format()
        && [Format::F16, Format::BF16].contains(&keys.format())
    {
        let (format, from) = (keys.format(), keys.bytes());
        let mut at = 0;
        let turned = QuantizedStack::from_tensor(format, [heads, latent, nope], |to| {
            to.copy_from_slice(&from[at..at + to.len()]);
            at += to.len();
            Ok::<_, candle_core::Error>(())
        })?;
        let mut bytes = Vec::with_capacity(from.len() + values.bytes().len());
        for head in 0..heads {
            bytes.extend_from_slice(turned.get(head)?.bytes());
            bytes.extend_from_slice(values.rows(head * value..(head + 1) * value)?.bytes());
        }
        return Ok(QuantizedMatrix::new(format, heads * (nope + value), latent, bytes.into())?.into());
    }
    let keys = keys.to_tensor()?.reshape((heads, latent, nope))?.transpose(1, 2)?;
    let values = values.to_tensor()?.reshape((heads, value, latent))?;
    Ok(Tensor::cat(&[keys.contiguous()?, values], 1)?.reshape((heads * (nope + value), latent))?.into())
}
