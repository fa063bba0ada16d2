//! Parts of the transforms, each compiled for the widest vectors of the machine.

use super::transform::{self, Grid, PATCH, TILE, TileOutput};
use super::{Tiles, Winograd, distance};
use crate::vae::sizes::{ConvolutionSizes, Padded};
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Transforms the weights of some terms of the products' sums and some output channels.
pub(super) struct WeightTask<'a, 'b> {
    pub(super) sizes: ConvolutionSizes,
    /// `[time, 3, 3, inputs, outputs]`
    pub(super) weights: &'a [f32],
    pub(super) channels: &'a Range<usize>,
    pub(super) terms: Range<usize>,
    /// For each product `[terms, channels]`.
    pub(super) to: &'a mut [&'b mut [f32]],
}

impl WithSimd for WeightTask<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ConvolutionSizes { inputs, outputs, .. } = self.sizes;
        let count = self.channels.len();
        for (index, term) in self.terms.enumerate() {
            let position = term / inputs * 9 * inputs + term % inputs;
            let data = &self.weights[position * outputs + self.channels.start..];
            let grid = Grid { data, row: 3 * inputs * outputs, col: inputs * outputs };
            transform::weights(simd, grid, count, self.to, index * count);
        }
    }
}

/// Transforms the inputs of some tiles of a rectangle.
pub(super) struct InputTask<'a, 'b> {
    pub(super) input: &'a Padded<'a>,
    pub(super) frames: usize,
    pub(super) channels: usize,
    pub(super) tiles: &'a Tiles,
    pub(super) some: Range<usize>,
    /// For each product `[tiles, frames, channels]`.
    pub(super) to: &'a mut [&'b mut [f32]],
}

impl WithSimd for InputTask<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { input, frames, channels, tiles, some, to } = self;
        let row = input.cols * channels;
        let mut border = vec![0.0; PATCH * PATCH * channels];
        // Frame after frame, so that few rows are read at a time: the processor then fetches them ahead.
        for frame in 0..frames {
            for (index, tile) in some.clone().enumerate() {
                let top = (tiles.rows.start + tile / tiles.cols.len()) * TILE;
                let left = (tiles.cols.start + tile % tiles.cols.len()) * TILE;
                let data = &input.data[(frame * input.rows + top) * row + left * channels..];
                let (rows, cols) = ((input.rows - top).min(PATCH), (input.cols - left).min(PATCH));
                let patch = if rows == PATCH && cols == PATCH {
                    Grid { data, row, col: channels }
                } else {
                    // The last tiles have rows and columns of which there is no input.
                    border.fill(0.0);
                    for (to, from) in border.chunks_exact_mut(PATCH * channels).zip(data.chunks(row)).take(rows) {
                        to[..cols * channels].copy_from_slice(&from[..cols * channels]);
                    }
                    Grid { data: &border, row: PATCH * channels, col: channels }
                };
                transform::inputs(simd, patch, channels, to, (index * frames + frame) * channels);
            }
        }
    }
}

/// Transforms the products of consecutive tiles of a row of tiles to sums.
pub(super) struct OutputTask<'a, 'b> {
    pub(super) winograd: Winograd,
    pub(super) products: &'a [f32],
    pub(super) tiles: &'a Tiles,
    pub(super) channels: &'a Range<usize>,
    /// The frame and the row of tiles, and the number of the first tile in the rectangle's part of that row.
    pub(super) first: [usize; 3],
    pub(super) bias: &'a [f32],
    pub(super) add: Option<&'a [f32]>,
    /// The rows of the output in these tiles, with all channels.
    pub(super) rows: &'a mut [&'b mut [f32]],
}

impl WithSimd for OutputTask<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { winograd, products, tiles, channels, first: [frame, tile_row, first], bias, add, rows } = self;
        let (all, outputs) = (winograd.sizes.outputs, channels.len());
        let count = tiles.count();
        let distance = distance(winograd.frames * count * outputs);
        let cols = rows.first().map_or(0, |row| row.len() / all);
        let left = (tiles.cols.start + first) * TILE;
        let start = ((frame * winograd.rows + tile_row * TILE) * winograd.cols + left) * all;
        let add = add.map_or(&[][..], |add| &add[start..]);
        let add: Vec<&[f32]> = add.chunks(winograd.cols * all).take(rows.len()).collect();
        for tile in 0..cols.div_ceil(TILE) {
            let index = (tile_row - tiles.rows.start) * tiles.cols.len() + first + tile;
            let data = &products[(frame * count + index) * outputs..];
            let grid = Grid { data, row: PATCH * distance, col: distance };
            let col = tile * TILE;
            let first = col * all + channels.start;
            let mut output = TileOutput { rows, add: &add, cols: (cols - col).min(TILE), first, position: all };
            transform::outputs(simd, grid, &bias[channels.clone()], &mut output);
        }
    }
}
