//! Transformed sums against sums over all positions in f64.

use super::*;
use ringspan_candle::pool;

/// Values in [-1, 1] without a pattern.
fn values(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|index| ((index * 7919 + seed) as f32 * 0.377).sin()).collect()
}

/// The sum at an output, with the bias.
fn reference(
    sizes: ConvolutionSizes,
    input: &Padded,
    (weights, bias): (&[f32], &[f32]),
    [frame, row, col, output]: [usize; 4],
) -> f64 {
    let ConvolutionSizes { inputs, outputs, time, .. } = sizes;
    let mut sum = f64::from(bias[output]);
    for (t, y, x) in (0..time * 9).map(|position| (position / 9, position / 3 % 3, position % 3)) {
        let from = ((frame + t) * input.rows + row + y) * input.cols + col + x;
        let values = &input.data[from * inputs..][..inputs];
        for (channel, value) in values.iter().enumerate() {
            let weight = weights[(((t * 3 + y) * 3 + x) * inputs + channel) * outputs + output];
            sum += f64::from(*value) * f64::from(weight);
        }
    }
    sum
}

/// Relative L2 distance of the sums to those in f64, at all positions of some output channels.
fn distance(sizes: ConvolutionSizes, [frames, rows, cols]: [usize; 3], outputs: &[usize], threads: usize) -> f64 {
    let (all_rows, all_cols) = (rows + 2, cols + 2);
    let data = values((frames + sizes.time - 1) * all_rows * all_cols * sizes.inputs, 1);
    let input = Padded { data: &data, rows: all_rows, cols: all_cols };
    let weights = values(sizes.time * 9 * sizes.inputs * sizes.outputs, 2);
    let (bias, add) = (values(sizes.outputs, 3), values(frames * rows * cols * sizes.outputs, 4));
    // What was in the output before has no effect.
    let mut out = vec![f32::NAN; add.len()];
    let winograd = Winograd { sizes, frames, rows, cols };
    pool::run(threads, || winograd.apply(&input, &weights, &bias, Some(&add), &mut out)).expect("threads");
    let (mut apart, mut size) = (0.0, 0.0);
    for position in 0..frames * rows * cols {
        let (frame, row, col) = (position / cols / rows, position / cols % rows, position % cols);
        for output in outputs {
            let at = position * sizes.outputs + output;
            let wanted = reference(sizes, &input, (&weights, &bias), [frame, row, col, *output]) + f64::from(add[at]);
            apart += (f64::from(out[at]) - wanted).powi(2);
            // Sums whose terms happen to cancel have the errors of others.
            size += wanted.powi(2).max(0.25 * winograd.terms() as f64 * 9.0);
        }
    }
    (apart / size).sqrt()
}

#[test]
fn sums_of_any_sizes_are_those_of_all_positions() {
    let shapes = [[1, 1, 1], [2, 3, 5], [1, 4, 8], [3, 9, 13]];
    for (inputs, outputs) in [(1, 1), (3, 17), (16, 3), (40, 96)] {
        for sizes in [ConvolutionSizes::causal(inputs, outputs), ConvolutionSizes::spatial(inputs, outputs)] {
            for shape in shapes {
                for threads in [1, 3] {
                    let apart = distance(sizes, shape, &Vec::from_iter(0..outputs), threads);
                    assert!(apart < 2e-6, "{sizes:?} of {shape:?} on {threads} threads: {apart:e}");
                }
            }
        }
    }
}

#[test]
fn outputs_and_tiles_are_divided_where_buffers_would_be_large() {
    let (sizes, shape) = (ConvolutionSizes::causal(256, 50), [5, 5, 130]);
    let winograd = Winograd { sizes, frames: shape[0], rows: shape[1], cols: shape[2] };
    assert_eq!(winograd.outputs_at_once(), 48);
    assert_eq!(winograd.rectangle(48), (1, 11), "of {} x {} tiles", winograd.tile_rows(), winograd.tile_cols());
    assert!(winograd.buffers() <= 2 * WEIGHTS + 4 * PRODUCTS * LINE);
    let apart = distance(sizes, shape, &[0, 47, 48, 49], 2);
    assert!(apart < 2e-6, "{apart:e}");
}

#[test]
fn few_outputs_are_sums_over_all_positions() {
    let sizes = ConvolutionSizes::causal(384, 384);
    for (shape, faster) in [([1, 1, 1], false), ([1, 8, 8], false), ([9, 1, 200], false), ([1, 32, 32], true)] {
        assert_eq!(Winograd::faster(sizes, shape).is_some(), faster, "{shape:?}");
    }
    let stride = ConvolutionSizes { stride: 2, ..ConvolutionSizes::spatial(96, 96) };
    assert!(Winograd::faster(stride, [1, 64, 64]).is_none());
    assert!(Winograd::faster(ConvolutionSizes::temporal(96, 96), [1, 64, 64]).is_none());
}
