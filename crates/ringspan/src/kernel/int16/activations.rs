//! Activations that are rounded to integers.

use super::instructions::{Instructions, VectorWork};
use super::lanes::Lanes;
use super::{BLOCK, COLUMNS};
use std::ops::Range;

/// Number of blocks in a chunk.
const BLOCKS: usize = COLUMNS / BLOCK;
/// The largest code of an activation.
const MOST: f32 = i16::MAX as f32;
/// A block whose activations are all smaller is rounded to zeros, since the factor that scales them to codes would not be finite.
const LEAST: f32 = f32::MIN_POSITIVE * 65536.0;

/// The activations of a token in some consecutive columns.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Chunk {
    /// Pairs of neighbours, as one instruction multiplies them.
    pub(super) pairs: [[i16; 2]; COLUMNS / 2],
    pub(super) scales: [f32; BLOCKS],
    /// The sum of the rounded activations of each block.
    pub(super) sums: [f32; BLOCKS],
}

impl Chunk {
    const ZERO: Self = Self { pairs: [[0; 2]; COLUMNS / 2], scales: [0.0; BLOCKS], sums: [0.0; BLOCKS] };

    /// Rounds activations; columns behind them become zeros.
    #[inline(always)]
    fn round<L: Lanes>(&mut self, l: L, row: &[f32]) {
        let (blocks, rest) = row.as_chunks::<BLOCK>();
        for (index, block) in blocks.iter().enumerate() {
            self.round_block(l, index, block);
        }
        let mut rounded = blocks.len();
        if !rest.is_empty() {
            let mut block = [0.0; BLOCK];
            block[..rest.len()].copy_from_slice(rest);
            self.round_block(l, rounded, &block);
            rounded += 1;
        }
        for index in rounded..BLOCKS {
            self.round_block(l, index, &[0.0; BLOCK]);
        }
    }

    #[inline(always)]
    fn round_block<L: Lanes>(&mut self, l: L, index: usize, block: &[f32; BLOCK]) {
        let most = l.largest(block);
        // NaN as the scale makes all products NaN, whatever the codes are.
        let (scale, to_code) = match most {
            _ if !most.is_finite() => (f32::NAN, 0.0),
            _ if most < LEAST => (0.0, 0.0),
            _ => (most / MOST, MOST / most),
        };
        let to = &mut self.pairs.as_chunks_mut::<{ BLOCK / 2 }>().0[index];
        self.scales[index] = scale;
        self.sums[index] = l.round(block, to_code, to) as f32 * scale;
    }
}

/// Rows of activations, `[tokens, width]`, each block of [`BLOCK`] columns rounded to integers of 16 bits.
#[derive(Debug, Clone)]
pub struct RoundedActivations {
    tokens: usize,
    width: usize,
    /// `[width / COLUMNS][tokens]`. Columns behind the width are zeros.
    chunks: Vec<Chunk>,
}

impl RoundedActivations {
    /// Zeros, to be overwritten through [`parts_mut`](Self::parts_mut).
    pub fn zeros(tokens: usize, width: usize) -> Self {
        Self { tokens, width, chunks: vec![Chunk::ZERO; tokens * width.div_ceil(COLUMNS)] }
    }

    /// Each [`COLUMNS`] columns, to be rounded independently.
    pub fn parts_mut(&mut self) -> impl Iterator<Item = ActivationColumns<'_>> {
        let parts = self.chunks.chunks_mut(self.tokens.max(1));
        parts.enumerate().map(|(index, chunks)| ActivationColumns { start: index * COLUMNS, width: self.width, chunks })
    }

    /// The chunks of some tokens with the columns from `start` on, a multiple of [`COLUMNS`], and the number of blocks in `width` columns.
    pub(super) fn chunks(&self, tokens: Range<usize>, (start, width): (usize, usize)) -> (&[Chunk], usize) {
        assert!(start.is_multiple_of(COLUMNS) && width <= COLUMNS && start + width <= self.width);
        (&self.chunks[start / COLUMNS * self.tokens..][..self.tokens][tokens], width.div_ceil(BLOCK))
    }
}

/// Some columns of activations.
#[derive(Debug)]
pub struct ActivationColumns<'a> {
    start: usize,
    width: usize,
    chunks: &'a mut [Chunk],
}

impl ActivationColumns<'_> {
    /// Rounds the activations in these columns of each token, whose row is `row(token)`.
    ///
    /// # Panics
    /// Shorter rows.
    pub fn round<'x>(&mut self, instructions: Instructions, row: impl Fn(usize) -> &'x [f32]) {
        for (token, chunk) in self.chunks.iter_mut().enumerate() {
            let row = &row(token)[self.start..self.width.min(self.start + COLUMNS)];
            instructions.run(Rounding { row, chunk });
        }
    }
}

struct Rounding<'a> {
    row: &'a [f32],
    chunk: &'a mut Chunk,
}

impl VectorWork for Rounding<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        self.chunk.round(l, self.row);
    }
}
