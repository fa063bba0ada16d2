//! Winograd's transforms: with them, 36 products give the sums of a kernel of 3 x 3 at 4 x 4 positions, instead of 144.
//!
//! Four outputs in a row depend on six inputs and three weights. Inputs and weights are evaluated, as polynomials, at the points 0,
//! 5/8, -5/8, 8/5, -8/5 and at infinity; of the six products, the four sums are combinations. In two dims that is done to the rows and
//! then to the columns. The points are pairs whose product is 1, which keeps the coefficients small: rounding errors are 6e-7 of the
//! output (relative L2, 96 channels), where sums without transforms have 2e-7, and the usual points 1 and 2 give 1.4e-6.
//!
//! Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, 2016; Barabasz, Anderson, Soodhalter and Gregg, Error
//! Analysis and Improving the Accuracy of Winograd Convolution for Deep Neural Networks, 2020.

use pulp::Simd;
use std::ops::{Add, Mul, Range, Sub};

/// Output rows, and columns, of a tile.
pub(super) const TILE: usize = 4;
/// Input rows, and columns, that a tile depends on.
pub(super) const PATCH: usize = TILE + 2;
/// Products of an input channel and an output channel for a tile.
pub(super) const PRODUCTS: usize = PATCH * PATCH;
/// Rows, and columns, of the kernel.
const SIDE: usize = 3;

const P: f32 = 5.0 / 8.0;
const Q: f32 = 8.0 / 5.0;
const P2: f32 = P * P;
const Q2: f32 = Q * Q;

/// A vector of values of consecutive channels.
#[derive(Clone, Copy)]
struct Lanes<S: Simd> {
    simd: S,
    values: S::f32s,
}

impl<S: Simd> Lanes<S> {
    #[inline(always)]
    fn zero(simd: S) -> Self {
        Self { simd, values: simd.splat_f32s(0.0) }
    }

    /// The first values; those behind the slice are zero.
    #[inline(always)]
    fn load(simd: S, values: &[f32]) -> Self {
        let values = match S::as_simd_f32s(values).0.first() {
            Some(values) => *values,
            None => simd.partial_load_f32s(values),
        };
        Self { simd, values }
    }

    /// Writes as many values as there is room for.
    #[inline(always)]
    fn store(self, to: &mut [f32]) {
        match S::as_mut_simd_f32s(to).0.first_mut() {
            Some(to) => *to = self.values,
            None => self.simd.partial_store_f32s(to, self.values),
        }
    }
}

impl<S: Simd> Add for Lanes<S> {
    type Output = Self;

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self { values: self.simd.add_f32s(self.values, other.values), ..self }
    }
}

impl<S: Simd> Sub for Lanes<S> {
    type Output = Self;

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self { values: self.simd.sub_f32s(self.values, other.values), ..self }
    }
}

impl<S: Simd> Mul<f32> for Lanes<S> {
    type Output = Self;

    #[inline(always)]
    fn mul(self, factor: f32) -> Self {
        Self { values: self.simd.mul_f32s(self.values, self.simd.splat_f32s(factor)), ..self }
    }
}

/// A transform of N values in a row to M.
trait Transform<const N: usize, const M: usize> {
    fn apply<S: Simd>(x: [Lanes<S>; N]) -> [Lanes<S>; M];
}

/// The values at the points of six inputs.
struct OfInputs;

impl Transform<PATCH, PATCH> for OfInputs {
    #[inline(always)]
    fn apply<S: Simd>(x: [Lanes<S>; PATCH]) -> [Lanes<S>; PATCH] {
        let (even, odd) = (x[4] - x[2] * Q2, (x[3] - x[1] * Q2) * P);
        let (even_q, odd_q) = (x[4] - x[2] * P2, (x[3] - x[1] * P2) * Q);
        let first = x[0] + x[4] - x[2] * (P2 + Q2);
        let last = x[1] + x[5] - x[3] * (P2 + Q2);
        [first, even + odd, even - odd, even_q + odd_q, even_q - odd_q, last]
    }
}

/// The values at the points of three weights, divided by what the transform of the inputs multiplies.
struct OfWeights;

impl Transform<SIDE, PATCH> for OfWeights {
    #[inline(always)]
    fn apply<S: Simd>(w: [Lanes<S>; SIDE]) -> [Lanes<S>; PATCH] {
        const AT_P: f32 = 1.0 / (2.0 * P2 * (P2 - Q2));
        const AT_Q: f32 = 1.0 / (2.0 * Q2 * (Q2 - P2));
        let (even, odd) = (w[0] * AT_P + w[2] * (P2 * AT_P), w[1] * (P * AT_P));
        let (even_q, odd_q) = (w[0] * AT_Q + w[2] * (Q2 * AT_Q), w[1] * (Q * AT_Q));
        [w[0], even + odd, even - odd, even_q + odd_q, even_q - odd_q, w[2]]
    }
}

/// Four sums of the products at the points.
struct OfProducts;

impl Transform<PATCH, TILE> for OfProducts {
    #[inline(always)]
    fn apply<S: Simd>(m: [Lanes<S>; PATCH]) -> [Lanes<S>; TILE] {
        let (even, odd) = (m[1] + m[2], (m[1] - m[2]) * P);
        let (even_q, odd_q) = (m[3] + m[4], (m[3] - m[4]) * Q);
        [m[0] + even + even_q, odd + odd_q, even * P2 + even_q * Q2, odd * P2 + odd_q * Q2 + m[5]]
    }
}

/// Values in two dims: those of a position begin `row` numbers after those of the position above, and `col` after those on the left.
#[derive(Clone, Copy)]
pub(super) struct Grid<'a> {
    pub(super) data: &'a [f32],
    pub(super) row: usize,
    pub(super) col: usize,
}

/// Transforms the rows of a grid, and then the columns; `some` are the channels of a position that are transformed. A closure must be
/// `#[inline(always)]`.
#[inline(always)]
fn in_two_dims<T: Transform<N, M>, S: Simd, const N: usize, const M: usize>(
    simd: S,
    grid: Grid,
    some: Range<usize>,
    mut write: impl FnMut(usize, usize, Lanes<S>),
) {
    let mut rows = [[Lanes::zero(simd); M]; N];
    for (row, to) in rows.iter_mut().enumerate() {
        let mut values = [Lanes::zero(simd); N];
        for (col, value) in values.iter_mut().enumerate() {
            let position = row * grid.row + col * grid.col;
            *value = Lanes::load(simd, &grid.data[position + some.start..position + some.end]);
        }
        *to = T::apply(values);
    }
    for col in 0..M {
        let mut column = [Lanes::zero(simd); N];
        for (to, row) in column.iter_mut().zip(&rows) {
            *to = row[col];
        }
        let values = T::apply(column);
        for (row, value) in values.iter().enumerate() {
            write(row, col, *value);
        }
    }
}

/// Transforms all channels of the input of a tile, 6 x 6 positions. The values of product `p` are written to `to[p]`, from `at` on.
#[inline(always)]
pub(super) fn inputs<S: Simd>(simd: S, patch: Grid, channels: usize, to: &mut [&mut [f32]], at: usize) {
    for from in (0..channels).step_by(S::F32_LANES) {
        in_two_dims::<OfInputs, S, PATCH, PATCH>(
            simd,
            patch,
            from..channels,
            #[inline(always)]
            |row, col, value| value.store(&mut to[row * PATCH + col][at + from..at + channels]),
        );
    }
}

/// Transforms the weights of an input channel and some output channels, at 3 x 3 positions. The values of product `p` are written to
/// `to[p]`, from `at` on.
#[inline(always)]
pub(super) fn weights<S: Simd>(simd: S, weights: Grid, outputs: usize, to: &mut [&mut [f32]], at: usize) {
    for from in (0..outputs).step_by(S::F32_LANES) {
        in_two_dims::<OfWeights, S, SIDE, PATCH>(
            simd,
            weights,
            from..outputs,
            #[inline(always)]
            |row, col, value| value.store(&mut to[row * PATCH + col][at + from..at + outputs]),
        );
    }
}

/// Where the sums of a tile are written, of some output channels.
pub(super) struct TileOutput<'a, 'b, 'c> {
    /// The tile's rows of the output; the last tiles have less than four.
    pub(super) rows: &'a mut [&'b mut [f32]],
    /// What is added to these rows.
    pub(super) add: &'a [&'c [f32]],
    /// Columns of the tile: four, or less in the last tiles.
    pub(super) cols: usize,
    /// The first channel at the first column, in each row.
    pub(super) first: usize,
    /// Numbers from a column to the next.
    pub(super) position: usize,
}

/// Transforms the products of output channels, 6 x 6 of each, and writes the sums to their places, with the bias.
#[inline(always)]
pub(super) fn outputs<S: Simd>(simd: S, products: Grid, bias: &[f32], output: &mut TileOutput) {
    let TileOutput { rows, add, cols, first, position } = output;
    let outputs = bias.len();
    for from in (0..outputs).step_by(S::F32_LANES) {
        let bias = Lanes::load(simd, &bias[from..]);
        in_two_dims::<OfProducts, S, PATCH, TILE>(
            simd,
            products,
            from..outputs,
            #[inline(always)]
            |row, col, sums| {
                if row >= rows.len() || col >= *cols {
                    return;
                }
                let place = *first + col * *position;
                let place = place + from..place + outputs;
                let mut sums = sums + bias;
                if let Some(add) = add.get(row) {
                    sums = sums + Lanes::load(simd, &add[place.clone()]);
                }
                sums.store(&mut rows[row][place]);
            },
        );
    }
}
