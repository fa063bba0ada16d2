//! Tests of norms, rotary embeddings and gates, which are kernels of this crate on a GPU, for every width and for
//! tensors with any strides.

use crate::{assert_equal, assert_within, bound, compare, gpu, numbers, random, results, rounding};
use candle_core::{DType, Device, Result, Tensor};
use ringspan_candle::activation::Activation;
use ringspan_candle::cast::cast;
use ringspan_candle::norm::rms_norm;
use ringspan_candle::rope::{RotaryTable, rope};
use ringspan_candle::swiglu::gated;
use ringspan_candle::{Precision, RankDevice};

const EPS: f64 = 1e-5;

fn rotation(tokens: usize, half: usize) -> RotaryTable {
    let positions: Vec<usize> = (0..tokens).map(|token| token * token * 7 % 1001).collect();
    let frequencies: Vec<f64> = (0..half).map(|pair| 10_000f64.powf(-(pair as f64) / half as f64)).collect();
    RotaryTable::new(&positions, &frequencies, 1.1)
}

/// The norms of rows of x, and the gradients of x and of the weight.
fn norm_in_f64(x: &[f32], w: &[f32], d: &[f32], eps: f64) -> [Vec<f32>; 3] {
    let width = w.len();
    let (mut out, mut dx, mut dw) = (Vec::new(), Vec::new(), vec![0.0; width]);
    for (x, d) in x.chunks(width).zip(d.chunks(width)) {
        let mean = |f: &dyn Fn(usize) -> f64| (0..width).map(f).sum::<f64>() / width as f64;
        let [x, d, w] = [x, d, w].map(|row| row.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
        let root = (mean(&|i| x[i] * x[i]) + eps).sqrt();
        let along = mean(&|i| x[i] * w[i] * d[i]) / root.powi(3);
        for i in 0..width {
            out.push((x[i] / root * w[i]) as f32);
            dx.push((w[i] * d[i] / root - x[i] * along) as f32);
            dw[i] += d[i] * x[i] / root;
        }
    }
    [out, dx, dw.into_iter().map(|sum| sum as f32).collect()]
}

/// Tests rows that are handled by one thread, by a part of a warp, by a warp and by a block; read element by element and 16
/// bytes at once; and more rows than a chunk has, and than all chunks of the usual size have. The reference is f64, because
/// long f32 sums on the CPU are less exact.
#[test]
fn norms_of_every_width_and_number_of_rows() {
    let Some(gpu) = gpu() else { return };
    let narrow = [(3, 1), (5, 3), (70, 5), (9, 8), (40, 16), (7, 127), (65, 128), (33_000, 3)];
    let wide = [(3, 129), (2, 300), (4, 512), (70, 1024), (3, 1032), (2, 4099), (1, 65_536), (2, 65_537)];
    for (rows, width) in narrow.into_iter().chain(wide).chain([(1, 24), (0, 24), (0, 1)]) {
        let inputs = [random(&[rows, width], 1), random(&[width], 2)];
        // With a width of 1, the norm is the sign of x but for eps, so its gradient would be a difference of nearly equal
        // numbers.
        let eps = if width == 1 { 0.5 } else { EPS };
        let d = numbers(&random(&[rows, width], 99));
        let wanted = norm_in_f64(&numbers(&inputs[0]), &numbers(&inputs[1]), &d, eps);
        for gpu in [gpu.clone(), rounding(&gpu)] {
            let got = results(&gpu, &inputs, &|_, x| rms_norm(&x[0], &x[1], eps));
            for (index, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
                let what = format!("norm of {rows} x {width} in {}, result {index}", gpu.precision());
                assert_within(bound(&gpu), &what, got, wanted);
            }
        }
    }
}

#[test]
fn norms_whose_weight_is_an_offset_in_f32_or_is_not_trained() {
    for width in [7, 64] {
        let inputs = [random(&[5, width], 1), random(&[width], 2)];
        compare("norm with an offset", &inputs, |_, x| rms_norm(&x[0], &(cast(&x[1], DType::F32)? + 1.0)?, EPS));
        compare("norm with a constant weight", &inputs[..1], |device, x| {
            rms_norm(&x[0], &device.parameter(&inputs[1])?, EPS)
        });
    }
}

#[test]
fn norms_read_rows_that_lie_apart() {
    let weight = |width| random(&[width], 2);
    for first in [0, 3, 8] {
        compare("norm of columns", &[random(&[6, 32], 1), weight(16)], |_, x| {
            rms_norm(&x[0].narrow(1, first, 16)?, &x[1], EPS)
        });
    }
    compare("norm of some heads", &[random(&[4, 5, 8], 1), weight(8)], |_, x| {
        rms_norm(&x[0].narrow(1, 1, 3)?, &x[1], EPS)
    });
    compare("norm of a head", &[random(&[4, 5, 8], 1), weight(8)], |_, x| rms_norm(&x[0].narrow(1, 2, 1)?, &x[1], EPS));
    compare("norm of columns as rows", &[random(&[24, 6], 1), weight(24)], |_, x| rms_norm(&x[0].t()?, &x[1], EPS));
    compare("norm of one row many times", &[random(&[1, 24], 1), weight(24)], |_, x| {
        rms_norm(&x[0].broadcast_as((70, 24))?, &x[1], EPS)
    });
    compare("norm with a part of a weight", &[random(&[4, 16], 1), weight(50)], |_, x| {
        rms_norm(&x[0], &x[1].narrow(0, 17, 16)?, EPS)
    });
}

type Layer<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

/// The operation after a layer decides the strides of the gradient that it receives.
#[test]
fn gradients_are_read_in_their_strides() {
    let inputs = [random(&[4, 16], 1), random(&[16], 2), random(&[4, 16], 3)];
    let layers: [(&str, Layer); 3] = [
        ("norm", &|x| rms_norm(&x[0], &x[1], EPS)),
        ("gate", &|x| gated(&x[0], &x[2], Activation::Silu)),
        ("rope", &|x| rope(&x[0].reshape((4, 2, 8))?, &rotation(4, 4))?.flatten_from(1)),
    ];
    for (name, layer) in layers {
        compare(&format!("{name}, transposed"), &inputs, |_, x| used(layer(x)?.t()?, x));
        for before in [3, 8] {
            compare(&format!("{name} after {before} columns"), &inputs, |_, x| {
                used(Tensor::cat(&[&x[2].narrow(1, 0, before)?, &layer(x)?], 1)?, x)
            });
        }
    }
}

/// Adds a little of each input to y, so that all inputs are in its graph.
fn used(y: Tensor, x: &[Tensor]) -> Result<Tensor> {
    x.iter().try_fold(y, |y, x| y.broadcast_add(&(x.flatten_all()?.narrow(0, 0, 1)? * 0.5)?))
}

#[test]
fn rotations_of_every_width_and_in_any_strides() {
    for (tokens, heads, half) in [(5, 3, 1), (4, 2, 3), (3, 1, 4), (6, 2, 8), (2, 3, 20), (20, 2, 64), (1, 1, 256)] {
        let turned = rotation(tokens, half);
        let what = format!("rope of {tokens} x {heads} x {}", 2 * half);
        compare(&what, &[random(&[tokens, heads, 2 * half], 1)], |_, x| rope(&x[0], &turned));
        compare(&format!("{what}, heads first"), &[random(&[heads, tokens, 2 * half], 1)], |_, x| {
            rope(&x[0].transpose(0, 1)?, &turned)
        });
        compare(&format!("{what}, of columns"), &[random(&[tokens, heads, 2 * half + 9], 1)], |_, x| {
            rope(&x[0].narrow(2, 8, 2 * half)?, &turned)
        });
        compare(&format!("{what}, width first"), &[random(&[2 * half, heads, tokens], 1)], |_, x| {
            rope(&x[0].transpose(0, 2)?, &turned)
        });
    }
    for shape in [[0, 2, 8], [3, 0, 8]] {
        compare("rope of nothing", &[random(&shape, 1)], |_, x| rope(&x[0], &rotation(shape[0], 4)));
    }
}

#[test]
fn gates_of_every_size_and_in_any_strides() {
    for activation in [Activation::Silu, Activation::GeluTanh] {
        for shape in [&[0, 4][..], &[1, 1], &[3, 7], &[2, 3, 16], &[1, 24], &[9, 1000], &[20, 512]] {
            let inputs = [(random(shape, 1) * 8.0).expect("numbers"), random(shape, 2)];
            let what = format!("{activation:?} gate of {shape:?}");
            compare(&what, &inputs, |_, x| gated(&x[0], &x[1], activation));
        }
        for (width, from) in [(16, 0), (16, 3), (7, 0)] {
            compare("halves of a product", &[random(&[5, 2 * width + from], 1)], |_, x| {
                gated(&x[0].narrow(1, from, width)?, &x[0].narrow(1, from + width, width)?, activation)
            });
        }
        let inputs = [random(&[6, 16], 1), random(&[16, 6], 2), random(&[1, 16], 3)];
        compare("gate for columns", &inputs[..2], |_, x| gated(&x[0], &x[1].t()?, activation));
        compare("gate for a row", &[inputs[0].clone(), inputs[2].clone()], |_, x| {
            gated(&x[0], &x[1].broadcast_as((6, 16))?, activation)
        });
    }
}

/// Tests numbers whose exponentials under- or overflow, and that a NaN stays in its row.
#[test]
fn gates_and_norms_of_extreme_numbers() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let far = Tensor::new(&[[-200f32, 200.0, -88.0, 88.0, -1e4, 1e4, 0.0, -0.0]], &Device::Cpu)?;
    let one = far.ones_like()?;
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let inputs = [far.clone(), one.clone()];
        let [got, wanted] =
            [&gpu, &RankDevice::CPU].map(|device| results(device, &inputs, &|_, x| gated(&x[0], &x[1], activation)));
        for (got, wanted) in got.iter().zip(&wanted) {
            assert_equal("gate", got, wanted);
        }
    }
    let x = Tensor::new(&[[f32::NAN, 1.0, 2.0], [1.0, 2.0, 3.0], [f32::INFINITY, 0.0, 1.0]], &Device::Cpu)?;
    let inputs = [x, random(&[3], 2)];
    let [got, wanted] =
        [&gpu, &RankDevice::CPU].map(|device| results(device, &inputs, &|_, x| rms_norm(&x[0], &x[1], EPS)));
    for (got, wanted) in got.iter().zip(&wanted).take(2) {
        assert_equal("the row of numbers", &got[3..6], &wanted[3..6]);
        assert!(got[..3].iter().all(|x| x.is_nan()), "{got:?}");
    }
    Ok(())
}

/// Tests sums over tokens, too.
#[test]
fn the_same_inputs_give_the_same_bits() {
    let Some(gpu) = gpu() else { return };
    let inputs = [random(&[700, 40], 1), random(&[40], 2), random(&[700, 40], 3)];
    for device in [gpu.clone(), rounding(&gpu)] {
        let run = || {
            results(&device, &inputs, &|_, x| {
                let turned = rope(&rms_norm(&x[0], &x[1], EPS)?.reshape((700, 5, 8))?, &rotation(700, 4))?;
                gated(&turned.flatten_from(1)?, &x[2], Activation::GeluTanh)
            })
        };
        let bits = |all: Vec<Vec<f32>>| -> Vec<Vec<u32>> {
            all.into_iter().map(|numbers| numbers.into_iter().map(f32::to_bits).collect()).collect()
        };
        assert_eq!(bits(run()), bits(run()), "{}", device.precision());
    }
}

/// A layer in bf16 rounds its result once, and nothing inside.
#[test]
fn layers_in_bf16_compute_in_f32() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let gpu = rounding(&gpu);
    let (x, weight, up) = (random(&[9, 48], 1), random(&[48], 2), random(&[9, 48], 3));
    let turned = rotation(9, 8);
    let layers = |device: &RankDevice| -> Result<[Tensor; 3]> {
        let (x, weight, up) = (device.parameter(&x)?, device.parameter(&weight)?, device.parameter(&up)?);
        let heads = x.reshape((9, 3, 16))?;
        Ok([rms_norm(&x, &weight, EPS)?, gated(&x, &up, Activation::Silu)?, rope(&heads, &turned)?])
    };
    for (got, wanted) in layers(&gpu)?.iter().zip(layers(&RankDevice::CPU)?) {
        let wanted = numbers(&wanted.to_dtype(DType::BF16)?);
        let apart = numbers(got).iter().zip(&wanted).filter(|(got, wanted)| got != wanted).count();
        // One number may be rounded differently because its last bit in f32 differs.
        assert!(apart <= 1, "{apart} of {} numbers are rounded otherwise than once", wanted.len());
    }
    Ok(())
}

#[test]
fn other_types_are_refused_by_name() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let (x, weight) = (gpu.parameter(&random(&[2, 8], 1))?, gpu.parameter(&random(&[8], 2))?);
    let half = x.to_dtype(DType::F16)?;
    let refused = |result: Result<Tensor>| result.expect_err("another type").to_string();
    let gate = |up: &Tensor| gated(&x, up, Activation::Silu);
    assert!(refused(rms_norm(&half, &weight, EPS)).contains("F16"));
    assert!(refused(rope(&half.reshape((2, 1, 8))?, &rotation(2, 4))).contains("F16"));
    assert!(refused(gate(&half)).contains("F16"));
    let narrow = refused(gate(&x.to_dtype(Precision::Bf16.dtype())?));
    assert!(narrow.contains("F32") && narrow.contains("BF16"), "{narrow}");
    Ok(())
}
