//! MXFP4 as the safetensors files of gpt-oss store it, with codes and exponents in separate tensors.

use super::format::Format;
use super::matrix::QuantizedMatrix;
use crate::pool;
use candle_core::{Result, bail};

/// Count of numbers in a block.
const LEN: usize = 32;
/// Bytes of the codes of a block.
const CODES: usize = LEN / 2;

/// Blocks to be written, with their codes and exponents.
type BlockSlices<'a> = ((&'a mut [u8], &'a [[u8; CODES]]), &'a [u8]);

impl QuantizedMatrix {
    /// The MXFP4 matrix of `rows` x `columns` from `codes` `[rows, columns / 32, 16]` (in gpt-oss's files a tensor whose name
    /// ends in `_blocks`) and `exponents` `[rows, columns / 32]` (`_scales`); both are the slices of one expert.
    ///
    /// In the files, the halves of a byte are neighbouring numbers; in ggml's blocks, numbers that are 16 apart. So this
    /// makes a copy of 17 bytes for each 32 numbers.
    ///
    /// # Errors
    /// Rows that are not whole blocks, and a number of bytes that does not fit the matrix.
    pub fn from_gpt_oss(rows: usize, columns: usize, codes: &[u8], exponents: &[u8]) -> Result<Self> {
        let bytes = Format::Mxfp4.bytes(rows, columns)?;
        let block_bytes = Format::Mxfp4.block_bytes();
        let blocks = bytes / block_bytes;
        if (codes.len(), exponents.len()) != (CODES * blocks, blocks) {
            bail!(
                "gpt-oss stores an MXFP4 matrix of {rows} x {columns} in {} bytes of codes and {blocks} exponents, given {} and {}",
                CODES * blocks,
                codes.len(),
                exponents.len()
            );
        }
        let mut stored = vec![0; bytes];
        let part = pool::part(blocks, LEN);
        let (codes, _) = codes.as_chunks::<CODES>();
        let parts = stored.chunks_mut(part * block_bytes).zip(codes.chunks(part)).zip(exponents.chunks(part)).collect();
        pool::map(parts, |((to, codes), exponents): BlockSlices| {
            for ((to, codes), exponent) in to.chunks_exact_mut(block_bytes).zip(codes).zip(exponents) {
                to[0] = *exponent;
                to[1..].copy_from_slice(&halves_apart(codes));
            }
        });
        Self::new(Format::Mxfp4, rows, columns, stored.into())
    }
}

/// Reorders codes as ggml stores them: numbers i and 16 + i in byte i, instead of numbers 2 i and 2 i + 1.
fn halves_apart(pairs: &[u8; CODES]) -> [u8; CODES] {
    let mut codes = [0; CODES];
    let (first, second) = pairs.split_at(CODES / 2);
    for ((to, first), second) in codes.as_chunks_mut::<2>().0.iter_mut().zip(first).zip(second) {
        *to = [first & 15 | second << 4, first >> 4 | second & 0xf0];
    }
    codes
}
