//! Parameters that files store in two tensors, and parameters that hold the matrices of all experts of a layer.
//!
//! Shape letters: e experts, H heads, L latent width, N width of a head's keys without their rotary part, D width of a head's
//! values.

use candle_core::{Result, Tensor, bail};
use ringspan_candle::Weight;
use ringspan_candle::quantized::{Format, QuantizedMatrix, QuantizedStack};

/// How two tensors are joined to a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joined {
    /// Rows of the first and of the second tensor alternate, within each expert.
    Alternating,
    /// Each head has the transpose of its part of the first tensor, followed by its part of the second.
    LatentHeads,
}

/// Both tensors, each as rows of its last dimension, and with its shape.
pub(super) type SplitTensors = [(Weight, Vec<usize>); 2];

impl Joined {
    /// Joins the tensors to the parameter: two tensors `[e, out / 2, in]` to `[e, in, out]`, two `[e, out / 2]` to `[e, out]`,
    /// or `[H, L, N]` and `[H, D, L]` to `[H (N + D), L]`. The stored type is kept if both have one in which they can be
    /// joined; else it is f32.
    ///
    /// # Errors
    /// Shapes that do not fit each other.
    pub(super) fn parameter(self, both: SplitTensors) -> Result<Weight> {
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

/// Interleaves the rows of both matrices.
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

/// The matrix that computes keys and values from latent vectors. The keys' part has to be transposed, and quantization blocks
/// lie along its other dimension, so it keeps its stored type only if each number has bytes of its own (f16, bf16).
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
