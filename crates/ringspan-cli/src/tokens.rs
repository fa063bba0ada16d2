//! Batches of tokens from safetensors files.

use crate::files::TensorBytes;
use anyhow::{Context, Result, ensure};
use ringspan::Documents;
use safetensors::Dtype;
use std::path::Path;

/// A batch `[B, S]`, padded on the right.
pub(crate) struct TokenBatch {
    pub(crate) rows: usize,
    pub(crate) len: usize,
    /// Token ids `[B * S]`; 0 in padding.
    pub(crate) tokens: Vec<u32>,
    pub(crate) documents: Documents,
}

impl TokenBatch {
    /// A batch of one document.
    pub(crate) fn one(tokens: Vec<u32>) -> Self {
        Self { rows: 1, len: tokens.len(), documents: Documents::batch(1, tokens.len()), tokens }
    }

    /// Reads `tokens` (i64 or u32, [B, S]) and, where given, `lengths` (i32, [B]).
    pub(crate) fn read(file: &Path, vocabulary: usize) -> Result<Self> {
        let bytes = TensorBytes::read(file)?;
        let tensors = bytes.parse()?;
        let path = file.display();
        let given = tensors.get::<2>("tokens", &[Dtype::I64, Dtype::U32], "[B, S]")?;
        let [rows, len] = given.shape;
        rows.checked_mul(len).with_context(|| format!("{path}: `tokens` [{rows}, {len}] is too large"))?;
        let lengths = if tensors.has("lengths") {
            let lengths = tensors.get::<1>("lengths", &[Dtype::I32], "[B]")?;
            ensure!(lengths.shape == [rows], "{path}: `lengths` has shape {:?}, expected [{rows}] [B]", lengths.shape);
            let fits = |(row, length): (usize, i64)| {
                usize::try_from(length).ok().filter(|length| *length <= len).with_context(|| {
                    format!("{path}: `lengths`[{row}] is {length}, but a row of `tokens` has 0 to S = {len} tokens")
                })
            };
            lengths.integers().into_iter().enumerate().map(fits).collect::<Result<Vec<_>>>()?
        } else {
            vec![len; rows]
        };
        let values = given.integers();
        let mut tokens = vec![0; values.len()];
        for (row, &length) in lengths.iter().enumerate() {
            for column in 0..length {
                let value = values[row * len + column];
                let token = u32::try_from(value).ok().filter(|token| (*token as usize) < vocabulary);
                tokens[row * len + column] = token.with_context(|| {
                    format!(
                        "{path}: `tokens`[{row}, {column}] is {value}, but the model knows tokens 0 to {}",
                        vocabulary.saturating_sub(1)
                    )
                })?;
            }
        }
        Ok(Self { rows, len, tokens, documents: Documents::padded(&lengths, len)? })
    }
}
