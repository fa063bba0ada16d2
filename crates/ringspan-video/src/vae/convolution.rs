//! A convolution as products of matrices, over an input that has its padding already.
//!
//! With channels last, the values under one row of the kernel are contiguous: `side * inputs` numbers, and those of the next
//! column begin `inputs` numbers later. So a row of the kernel, at one frame, is a product with a matrix whose rows overlap in
//! memory; nothing is gathered. The sums over the kernel's rows and frames are added in the output. A kernel of 3 x 3 without a
//! stride is computed from transformed values instead (`winograd`), unless there are few outputs.

use super::sizes::{ConvolutionSizes, Padded};
use super::winograd::Winograd;
use candle_core::Tensor;
use ringspan::kernel::product::{Arithmetic, Matrix, Output, Packed};
use ringspan_candle::pool;

/// Output positions of a block of products: its sums stay in the cache while the kernel's rows are added.
const POSITIONS: usize = 1536;

impl ConvolutionSizes {
    /// Numbers that [`Convolution::apply`] holds beside its input, of `input_cols` padded columns, and its output.
    pub(crate) fn buffers(self, [frames, rows, cols]: [usize; 3], input_cols: usize) -> usize {
        match Winograd::faster(self, [frames, rows, cols]) {
            Some(winograd) => winograd.buffers(),
            None => {
                let packed = if Winograd::computes(self) { self.parameters() } else { 0 };
                packed + self.rows_at_once(input_cols, rows) * input_cols * self.outputs
            }
        }
    }

    /// Output rows of a block of products. Without a stride, the positions of several rows are one matrix, which has those of the
    /// padding between two rows as well. With a stride they are too many, so each row is a matrix.
    fn rows_at_once(self, input_cols: usize, rows: usize) -> usize {
        if self.stride == 1 { POSITIONS.div_ceil(input_cols.max(1)).min(rows) } else { 1 }
    }
}

/// The weights of a convolution.
pub(crate) struct Convolution {
    sizes: ConvolutionSizes,
    weights: Weights,
    bias: Vec<f32>,
}

/// Weights in the order in which they are used. A *tap* is the matrix `[side * inputs, outputs]` of one frame and one row of the kernel.
enum Weights {
    /// `[time, side, side * inputs, outputs]`: each call transforms or packs them.
    Plain(Vec<f32>),
    /// The taps, packed for products.
    Packed(Vec<Packed<f32>>),
}

impl Convolution {
    /// Takes a weight `[outputs, inputs, time, side, side]` (or without `time` if that is 1) with its bias `[outputs]`.
    ///
    /// # Errors
    /// Tensors that are not f32 on a CPU.
    pub(crate) fn new(sizes: ConvolutionSizes, weight: &Tensor, bias: &Tensor) -> candle_core::Result<Self> {
        let ConvolutionSizes { inputs, outputs, time, side, .. } = sizes;
        let (weight, bias) = (weight.flatten_all()?.to_vec1::<f32>()?, bias.to_vec1()?);
        let volume = time * side * side;
        let mut plain = vec![0.0; weight.len()];
        // Some outputs at a time, so that what is read together is used while it is in the cache.
        const OUTPUTS: usize = 16;
        for (some, weight) in weight.chunks(OUTPUTS * inputs * volume).enumerate() {
            for (input, position) in (0..inputs).flat_map(|input| (0..volume).map(move |position| (input, position))) {
                let to = &mut plain[(position * inputs + input) * outputs + some * OUTPUTS..];
                let from = weight[input * volume + position..].iter().step_by(inputs * volume);
                to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            }
        }
        // Whether transformed weights are faster depends on the outputs of a call.
        let weights =
            if Winograd::computes(sizes) { Weights::Plain(plain) } else { Weights::Packed(taps(&plain, sizes)) };
        Ok(Self { sizes, weights, bias })
    }

    /// A convolution of these sizes of which only the memory is asked for.
    pub(crate) fn without_weights(sizes: ConvolutionSizes) -> Self {
        Self { sizes, weights: Weights::Packed(Vec::new()), bias: Vec::new() }
    }

    pub(crate) fn sizes(&self) -> ConvolutionSizes {
        self.sizes
    }

    /// Applies a kernel of one position to all of `positions` positions `[positions, inputs]`.
    pub(crate) fn pointwise(&self, values: &[f32]) -> Vec<f32> {
        let positions = values.len() / self.sizes.inputs;
        let padded = Padded { data: values, rows: 1, cols: positions };
        self.apply(&padded, [1, 1, positions], None)
    }

    /// The output `[frames, rows, cols, outputs]` of these sizes; `add`, of the same shape, is added to it.
    pub(crate) fn apply(&self, input: &Padded, [frames, rows, cols]: [usize; 3], add: Option<&[f32]>) -> Vec<f32> {
        let mut out = vec![0.0; frames * rows * cols * self.sizes.outputs];
        if out.is_empty() {
            return out;
        }
        match &self.weights {
            Weights::Plain(weights) => match Winograd::faster(self.sizes, [frames, rows, cols]) {
                Some(winograd) => winograd.apply(input, weights, &self.bias, add, &mut out),
                None => self.add_taps(&taps(weights, self.sizes), input, [frames, rows, cols], add, &mut out),
            },
            Weights::Packed(taps) => self.add_taps(taps, input, [frames, rows, cols], add, &mut out),
        }
        out
    }

    /// Sums the products of all taps.
    fn add_taps(
        &self,
        taps: &[Packed<f32>],
        input: &Padded,
        [frames, rows, cols]: [usize; 3],
        add: Option<&[f32]>,
        out: &mut [f32],
    ) {
        let ConvolutionSizes { outputs, stride, .. } = self.sizes;
        let rows_at_once = self.sizes.rows_at_once(input.cols, rows);
        let mut sums = vec![0.0; rows_at_once * input.cols * outputs];
        for frame in 0..frames {
            for first in (0..rows).step_by(rows_at_once) {
                let some = rows_at_once.min(rows - first);
                let pitch = if stride == 1 { input.cols } else { cols };
                let positions = (some - 1) * pitch + cols;
                let sums = &mut sums[..positions * outputs];
                self.products(taps, input, (frame, first), positions, sums);
                let at = (frame * rows + first) * cols * outputs;
                let range = at..at + some * cols * outputs;
                let add = add.map(|add| &add[range.clone()]);
                self.finish(sums, pitch, cols, &mut out[range], add);
            }
        }
    }

    /// Sums of `positions` positions from the first column of output row `row` on.
    fn products(
        &self,
        taps: &[Packed<f32>],
        input: &Padded,
        (frame, row): (usize, usize),
        positions: usize,
        sums: &mut [f32],
    ) {
        let ConvolutionSizes { inputs, side, time_stride, stride, .. } = self.sizes;
        for (index, tap) in taps.iter().enumerate() {
            let (frame, row) = (frame * time_stride + index / side, row * stride + index % side);
            let from = &input.data[(frame * input.rows + row) * input.cols * inputs..];
            let a = Matrix::strided(from, positions, side * inputs, stride * inputs);
            tap.product(a, if index == 0 { Output::Overwrite(sums) } else { Output::Add(sums) });
        }
    }

    /// Copies the sums of whole rows, which are `pitch` positions apart, and adds the bias.
    fn finish(&self, sums: &[f32], pitch: usize, cols: usize, out: &mut [f32], add: Option<&[f32]>) {
        let outputs = self.sizes.outputs;
        let rows: Vec<_> = out.chunks_mut(cols * outputs).enumerate().collect();
        let finish = |(row, out): (usize, &mut [f32])| {
            let sums = &sums[row * pitch * outputs..][..cols * outputs];
            let add = add.map(|add| &add[row * cols * outputs..][..cols * outputs]);
            pool::vectorized(
                #[inline(always)]
                || biased(sums, &self.bias, add, out),
            );
        };
        pool::map(rows, finish);
    }
}

/// Packs the taps of weights `[time, side, side * inputs, outputs]`.
fn taps(weights: &[f32], sizes: ConvolutionSizes) -> Vec<Packed<f32>> {
    let terms = sizes.side * sizes.inputs;
    let pack = |tap: &[f32]| Arithmetic::best().pack(Matrix::new(tap, terms, sizes.outputs));
    weights.chunks_exact(terms * sizes.outputs).map(pack).collect()
}

#[inline(always)]
fn biased(sums: &[f32], bias: &[f32], add: Option<&[f32]>, out: &mut [f32]) {
    for (out, sums) in out.chunks_exact_mut(bias.len()).zip(sums.chunks_exact(bias.len())) {
        for ((out, sum), bias) in out.iter_mut().zip(sums).zip(bias) {
            *out = sum + bias;
        }
    }
    if let Some(add) = add {
        out.iter_mut().zip(add).for_each(|(out, add)| *out += add);
    }
}
