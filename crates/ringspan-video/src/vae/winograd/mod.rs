//! A convolution of 3 x 3 positions without a stride, by Winograd's minimal filtering, over an input that has its padding already.
//!
//! Outputs are computed in tiles of 4 x 4. The weights are transformed first, then the input of some tiles, which gives 36 matrices
//! of each; their 36 products, transformed back, are the sums of these tiles. The frames of the kernel are terms of the products. That is
//! a quarter of the multiplications of sums over 3 x 3 positions, and the transforms are few operations beside products with many
//! channels. Weights are transformed in each call, since transformed they take four times their memory.

mod task;
#[cfg(test)]
mod test;
mod transform;

use super::sizes::{ConvolutionSizes, Padded};
use pulp::Arch;
use ringspan::kernel::product::{Arithmetic, Matrix, Output, Packed};
use ringspan_candle::pool;
use std::ops::Range;
use task::{InputTask, OutputTask, WeightTask};
use transform::{PRODUCTS, TILE};

/// The most numbers of transformed weights: 8 MiB. Output channels are divided where there are more.
const WEIGHTS: usize = 2 << 20;
/// The most numbers of transformed inputs and products of some tiles: 4 MiB, which stay in L3 caches.
const VALUES: usize = 1 << 20;
/// The least tiles that are multiplied together, even if they have more numbers.
const LEAST_TILES: usize = 16;
/// Output channels are divided at multiples of this, which all processors' products take without rest.
const CHANNELS: usize = 48;
/// Numbers of a cache line.
const LINE: usize = 16;
/// Tiles of a task of a transform.
const TILES_OF_TASK: usize = 8;
/// The number of tiles whose products take as long as the transform of the weights.
const TILES_OF_WEIGHTS: usize = 32;

/// The sizes of a convolution of some frames.
#[derive(Clone, Copy)]
pub(super) struct Winograd {
    sizes: ConvolutionSizes,
    frames: usize,
    rows: usize,
    cols: usize,
}

/// A rectangle of tiles.
struct Tiles {
    rows: Range<usize>,
    cols: Range<usize>,
}

impl Tiles {
    fn count(&self) -> usize {
        self.rows.len() * self.cols.len()
    }
}

impl Winograd {
    /// Whether this computes the sums of such a kernel.
    pub(super) fn computes(sizes: ConvolutionSizes) -> bool {
        sizes.side == 3 && sizes.stride == 1 && sizes.time_stride == 1
    }

    /// The convolution of these sizes, with `[frames, rows, cols]` outputs, if that is faster than sums over all positions: not for few
    /// outputs, where transforming the weights takes longer, or where tiles are mostly empty.
    pub(super) fn faster(sizes: ConvolutionSizes, [frames, rows, cols]: [usize; 3]) -> Option<Self> {
        let winograd = Self { sizes, frames, rows, cols };
        let tiles = frames * winograd.tile_rows() * winograd.tile_cols();
        let faster = PRODUCTS * (tiles + TILES_OF_WEIGHTS) < 9 * frames * rows * cols;
        (Self::computes(sizes) && faster).then_some(winograd)
    }

    /// Numbers that are held beside input and output.
    pub(super) fn buffers(self) -> usize {
        let outputs = self.outputs_at_once();
        let (rows, cols) = self.rectangle(outputs);
        let weights = PRODUCTS * self.terms() * outputs.next_multiple_of(LINE);
        // Transformed weights are there twice while they are packed. Matrices are up to two lines apart.
        weights + weights.max(rows * cols * self.numbers_of_tile(outputs)) + 4 * PRODUCTS * LINE
    }

    fn tile_rows(self) -> usize {
        self.rows.div_ceil(TILE)
    }

    fn tile_cols(self) -> usize {
        self.cols.div_ceil(TILE)
    }

    /// Terms of the sum of a product.
    fn terms(self) -> usize {
        self.sizes.time * self.sizes.inputs
    }

    /// Numbers of an input position, in all frames.
    fn depth(self) -> usize {
        (self.frames + self.sizes.time - 1) * self.sizes.inputs
    }

    /// The output channels whose weights are transformed together.
    fn outputs_at_once(self) -> usize {
        let most = (WEIGHTS / (PRODUCTS * self.terms()) / CHANNELS * CHANNELS).max(CHANNELS);
        let blocks = self.sizes.outputs.div_ceil(most);
        self.sizes.outputs.div_ceil(blocks).next_multiple_of(CHANNELS).min(self.sizes.outputs)
    }

    /// Numbers of a tile's transformed inputs and products.
    fn numbers_of_tile(self, outputs: usize) -> usize {
        PRODUCTS * (self.depth() + self.frames * outputs)
    }

    /// Rows and columns of a rectangle of tiles.
    fn rectangle(self, outputs: usize) -> (usize, usize) {
        let (rows, cols) = (self.tile_rows(), self.tile_cols());
        let most = (VALUES / self.numbers_of_tile(outputs)).max(LEAST_TILES);
        // As equal as possible.
        let divided = |count: usize, most: usize| count.div_ceil(count.div_ceil(most.max(1)).max(1));
        if cols <= most { (divided(rows, most / cols.max(1)), cols) } else { (1, divided(cols, most)) }
    }

    /// Writes the sums to `out` `[frames, rows, cols, outputs]`, with the bias and with `add`, of the same shape. `weights` is
    /// `[time, 3, 3, inputs, outputs]`.
    pub(super) fn apply(self, input: &Padded, weights: &[f32], bias: &[f32], add: Option<&[f32]>, out: &mut [f32]) {
        let outputs = self.outputs_at_once();
        let (tile_rows, tile_cols) = self.rectangle(outputs);
        for first in (0..self.sizes.outputs).step_by(outputs) {
            let channels = first..self.sizes.outputs.min(first + outputs);
            let factors = self.factors(weights, &channels);
            let most = tile_rows * tile_cols;
            let mut values = vec![0.0; PRODUCTS * distance(most * self.depth())];
            let mut products = vec![0.0; PRODUCTS * distance(most * self.frames * channels.len())];
            for row in (0..self.tile_rows()).step_by(tile_rows) {
                for col in (0..self.tile_cols()).step_by(tile_cols) {
                    let rows = row..self.tile_rows().min(row + tile_rows);
                    let tiles = Tiles { rows, cols: col..self.tile_cols().min(col + tile_cols) };
                    self.transform_inputs(input, &tiles, &mut values);
                    self.multiply(&factors, tiles.count(), &values, &mut products);
                    self.finish(&products, &tiles, &channels, (bias, add), out);
                }
            }
        }
    }

    /// The transformed weights of some output channels: for each product `[time * inputs, outputs]`.
    fn factors(self, weights: &[f32], channels: &Range<usize>) -> Vec<Packed<f32>> {
        let (outputs, terms) = (channels.len(), self.terms());
        let distance = distance(terms * outputs);
        let mut matrices = vec![0.0; PRODUCTS * distance];
        let rows_of_task = pool::part(terms, PRODUCTS * outputs);
        let to = matrices.chunks_exact_mut(distance).map(|matrix| &mut matrix[..terms * outputs]);
        let tasks = parts(to, rows_of_task * outputs);
        pool::map(tasks.into_iter().enumerate().collect(), |(task, mut to): (usize, Vec<&mut [f32]>)| {
            let rows = task * rows_of_task..terms.min((task + 1) * rows_of_task);
            Arch::new().dispatch(WeightTask { sizes: self.sizes, weights, channels, terms: rows, to: &mut to });
        });
        let pack = |matrix: &[f32]| Arithmetic::best().pack(Matrix::new(&matrix[..terms * outputs], terms, outputs));
        matrices.chunks_exact(distance).map(pack).collect()
    }

    /// Transforms the inputs of the tiles of a rectangle: 36 matrices `[tiles, frames, inputs]`.
    fn transform_inputs(self, input: &Padded, tiles: &Tiles, values: &mut [f32]) {
        let (len, frames) = (tiles.count() * self.depth(), self.depth() / self.sizes.inputs);
        let to = values.chunks_exact_mut(distance(len)).map(|values| &mut values[..len]).take(PRODUCTS);
        let tasks = parts(to, TILES_OF_TASK * self.depth());
        pool::map(tasks.into_iter().enumerate().collect(), |(task, mut to): (usize, Vec<&mut [f32]>)| {
            let some = task * TILES_OF_TASK..tiles.count().min((task + 1) * TILES_OF_TASK);
            Arch::new().dispatch(InputTask { frames, input, channels: self.sizes.inputs, tiles, some, to: &mut to });
        });
    }

    /// Multiplies transformed inputs by transformed weights: 36 matrices `[frames, tiles, outputs]`.
    fn multiply(self, factors: &[Packed<f32>], tiles: usize, values: &[f32], products: &mut [f32]) {
        let (depth, outputs) = (self.depth(), factors.first().map_or(0, |factor| factor.shape().1));
        let values = values.chunks_exact(distance(tiles * depth));
        let products = products.chunks_exact_mut(distance(self.frames * tiles * outputs));
        let tasks = factors.iter().zip(values).zip(products).collect();
        pool::map(tasks, |((factor, values), products): ((&Packed<f32>, &[f32]), &mut [f32])| {
            for (frame, products) in products.chunks_exact_mut(tiles * outputs).take(self.frames).enumerate() {
                let values = Matrix::strided(&values[frame * self.sizes.inputs..], tiles, self.terms(), depth);
                factor.product(values, Output::Overwrite(products));
            }
        });
    }

    /// Transforms the products of some tiles and output channels to sums, and writes these to their places.
    fn finish(
        self,
        products: &[f32],
        tiles: &Tiles,
        channels: &Range<usize>,
        (bias, add): (&[f32], Option<&[f32]>),
        out: &mut [f32],
    ) {
        let (all, row_len) = (self.sizes.outputs, self.cols * self.sizes.outputs);
        let columns = tiles.cols.start * TILE * all..row_len.min(tiles.cols.end * TILE * all);
        let mut tasks = Vec::new();
        for (frame, out) in out.chunks_exact_mut(self.rows * row_len).enumerate() {
            let tile_rows = out.chunks_mut(TILE * row_len).enumerate();
            for (tile_row, out) in tile_rows.take(tiles.rows.end).skip(tiles.rows.start) {
                let rows = out.chunks_exact_mut(row_len).map(|row| &mut row[columns.clone()]);
                let parts = parts(rows, TILES_OF_TASK * TILE * all).into_iter().enumerate();
                tasks.extend(parts.map(|(index, rows)| ([frame, tile_row, index * TILES_OF_TASK], rows)));
            }
        }
        pool::map(tasks, |(first, mut rows): ([usize; 3], Vec<&mut [f32]>)| {
            Arch::new().dispatch(OutputTask {
                winograd: self,
                products,
                tiles,
                channels,
                first,
                bias,
                add,
                rows: &mut rows,
            });
        });
    }
}

/// The distance of matrices of `len` numbers: an odd number of cache lines, so that the 36 numbers of a transform, one of each matrix,
/// lie in different sets of a cache.
fn distance(len: usize) -> usize {
    (len.div_ceil(LINE) | 1) * LINE
}

/// Divides each of the slices into parts of `len` numbers, and puts those with the same number together.
fn parts<'a>(slices: impl Iterator<Item = &'a mut [f32]>, len: usize) -> Vec<Vec<&'a mut [f32]>> {
    let mut parts: Vec<Vec<&mut [f32]>> = Vec::new();
    for slice in slices {
        for (index, part) in slice.chunks_mut(len).enumerate() {
            match parts.get_mut(index) {
                Some(parts) => parts.push(part),
                None => parts.push(vec![part]),
            }
        }
    }
    parts
}
