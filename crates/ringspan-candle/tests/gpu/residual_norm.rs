//! Tests of the residual sum on a GPU, alone and together with its norm: one kernel computes both, and one kernel their
//! gradients.

use crate::{assert_within, bound, compare, gpu, numbers, random, rounding};
use candle_core::{DType, Device, Result, Tensor, Var};
use ringspan_candle::cast::cast;
use ringspan_candle::norm::rms_norm;
use ringspan_candle::residual::{residual, residual_norm};
use ringspan_candle::{RankDevice, backward_from};

const EPS: f64 = 1e-5;

/// Both results, concatenated by rows.
fn both(x: &Tensor, y: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (sum, normed) = residual_norm(x, y, weight, EPS)?;
    Tensor::cat(&[&sum, &normed], 0)
}

fn inputs(rows: usize, width: usize) -> [Tensor; 3] {
    [random(&[rows, width], 1), random(&[rows, width], 2), random(&[width], 3)]
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    numbers(tensor).into_iter().map(f32::to_bits).collect()
}

/// Tests rows that are handled by one thread, by a part of a warp, by a warp and by a block; read element by element and 16
/// bytes at once.
#[test]
fn sums_and_norms_of_every_width_and_number_of_rows() {
    for (rows, width) in
        [(5, 3), (70, 5), (40, 16), (7, 127), (65, 128), (3, 129), (4, 512), (3, 1032), (2, 4099), (1, 24)]
    {
        compare(&format!("{rows} x {width}"), &inputs(rows, width), |_, x| both(&x[0], &x[1], &x[2]));
    }
    for (rows, width) in [(0, 24), (0, 1)] {
        compare("nothing", &inputs(rows, width), |_, x| both(&x[0], &x[1], &x[2]));
    }
    compare("heads", &[random(&[4, 3, 8], 1), random(&[4, 3, 8], 2), random(&[8], 3)], |_, x| {
        both(&x[0], &x[1], &x[2])
    });
}

/// The values equal those of separate kernels to the bit: each result is rounded as it is there.
#[test]
fn values_are_the_bits_of_a_sum_and_a_norm() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for gpu in [gpu.clone(), rounding(&gpu)] {
        for width in [7, 64, 1024] {
            for is_trained in [false, true] {
                let [x, y, weight] = inputs(9, width).map(|tensor| gpu.parameter(&tensor));
                let (x, y, weight) = (x?, y?, weight?);
                let x = if is_trained { Var::from_tensor(&x)?.into_inner() } else { x };
                let sum = residual(&x, &y)?;
                let (got, got_normed) = residual_norm(&x, &y, &weight, EPS)?;
                assert_eq!(bits(&got), bits(&sum), "{width} in {}", gpu.precision());
                assert_eq!(bits(&got_normed), bits(&rms_norm(&sum, &weight, EPS)?), "{width} in {}", gpu.precision());
                assert_eq!((got.track_op(), got_normed.track_op()), (is_trained, is_trained));
            }
        }
    }
    Ok(())
}

/// An f32 tensor may be added to a bf16 one, as the contribution of an adapter is; its gradient is f32.
#[test]
fn sums_of_every_size_and_of_two_types() {
    for shape in [&[0, 4][..], &[1, 1], &[3, 7], &[2, 3, 16], &[9, 1000], &[20, 512]] {
        let inputs = [random(shape, 1), random(shape, 2)];
        compare(&format!("sum of {shape:?}"), &inputs, |_, x| residual(&x[0], &x[1]));
        compare(&format!("f32 added to {shape:?}"), &inputs, |_, x| {
            residual(&x[0], &(cast(&x[1], DType::F32)? / 3.0)?)
        });
    }
    compare("columns and a row", &[random(&[8, 6], 1), random(&[1, 8], 2)], |_, x| {
        residual(&x[0].t()?, &x[1].broadcast_as((6, 8))?)
    });
}

/// The f32 summand is so small that it would have no effect if it were rounded to bf16 first.
#[test]
fn what_is_added_in_f32_is_rounded_with_the_sum() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let gpu = rounding(&gpu);
    let x = gpu.parameter(&Tensor::full(1f32, (3, 8), &Device::Cpu)?)?;
    // Half a unit in the last place of bf16 and a little more: without the little, the tie would be rounded to the even 1.
    let y = Tensor::full(1f32 / 256.0 + 1.0 / 65_536.0, (3, 8), x.device())?;
    let sum = residual(&x, &y)?;
    assert_eq!((sum.dtype(), numbers(&sum)), (DType::BF16, vec![1.007_812_5; 24]));
    let refused = residual(&y, &x).expect_err("a sum in f32").to_string();
    assert!(refused.contains("F32") && refused.contains("BF16"), "{refused}");
    Ok(())
}

#[test]
fn either_result_may_be_left_alone() {
    for width in [7, 64] {
        compare("the sum alone", &inputs(5, width), |_, x| {
            // The weight is added so that it has a gradient, which the comparison expects of every input.
            residual_norm(&x[0], &x[1], &x[2], EPS)?.0.broadcast_add(&x[2])
        });
        compare("the norm alone", &inputs(5, width), |_, x| Ok(residual_norm(&x[0], &x[1], &x[2], EPS)?.1));
    }
}

/// As in consecutive layers, the summand is computed from the norm before it, and the residual stream goes on.
#[test]
fn gradients_of_a_stream_meet_at_every_sum() {
    for width in [7, 64] {
        compare("three layers", &inputs(6, width), |_, x| {
            let (stream, h) = residual_norm(&x[0], &x[1], &x[2], EPS)?;
            let (stream, h) = residual_norm(&stream, &(h * 0.5)?, &x[2], EPS)?;
            let (stream, h) = residual_norm(&stream, &h.tanh()?, &x[2], EPS)?;
            residual(&stream, &(h * 0.25)?)
        });
        compare("x added to itself", &inputs(6, width), |_, x| both(&x[0], &x[0], &x[2])?.narrow(0, 0, 6)? + &x[1]);
    }
}

#[test]
fn weights_that_are_an_offset_in_f32_or_not_trained() {
    let inputs = inputs(5, 64);
    compare("an offset", &inputs, |_, x| both(&x[0], &x[1], &(cast(&x[2], DType::F32)? + 1.0)?));
    compare("a constant weight", &inputs[..2], |device, x| both(&x[0], &x[1], &device.parameter(&inputs[2])?));
    compare("a constant sum", &inputs[2..], |device, x| {
        both(&device.parameter(&inputs[0])?, &device.parameter(&inputs[1])?, &x[0])
    });
}

#[test]
fn summands_are_read_in_their_strides() {
    let weight = random(&[16], 3);
    for first in [0, 3, 8] {
        compare("columns", &[random(&[6, 32], 1), random(&[6, 16], 2), weight.clone()], |_, x| {
            both(&x[0].narrow(1, first, 16)?, &x[1], &x[2])
        });
        compare("columns of the other", &[random(&[6, 16], 1), random(&[6, 40], 2), weight.clone()], |_, x| {
            both(&x[0], &x[1].narrow(1, first, 16)?, &x[2])
        });
    }
    compare("columns as rows", &[random(&[16, 6], 1), random(&[6, 16], 2), weight.clone()], |_, x| {
        both(&x[0].t()?, &x[1], &x[2])
    });
    compare("one row many times", &[random(&[6, 16], 1), random(&[1, 16], 2), weight], |_, x| {
        both(&x[0], &x[1].broadcast_as((6, 16))?, &x[2])
    });
}

/// The sum and its norm are concatenated after other columns, and transposed.
#[test]
fn gradients_of_slices_and_transposed_outputs() {
    for (before_sum, before_norm) in [(0, 0), (3, 8), (8, 8), (8, 5)] {
        let inputs = [random(&[4, 16], 1), random(&[4, 16], 2), random(&[16], 3), random(&[4, 16], 4)];
        compare("after other columns", &inputs, |_, x| {
            let (sum, normed) = residual_norm(&x[0], &x[1], &x[2], EPS)?;
            let after = |columns: usize, y: &Tensor| Tensor::cat(&[&x[3].narrow(1, 0, columns)?, y], 1);
            Tensor::cat(&[after(before_sum, &sum)?, after(before_norm, &normed)?], 1)
        });
        compare("transposed", &inputs, |_, x| {
            let (sum, normed) = residual_norm(&x[0], &x[1], &x[2], EPS)?;
            let last = Tensor::cat(&[&x[3].t()?, &sum.t()?], 1)?;
            Tensor::cat(&[last, Tensor::cat(&[&normed.t()?, &x[3].t()?], 1)?], 1)
        });
    }
}

/// A graph can be differentiated more than once: no state is left over from the first time.
#[test]
fn a_second_backward_pass_has_its_own_gradients() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for gpu in [gpu.clone(), rounding(&gpu)] {
        let variable = |tensor: Tensor| Var::from_tensor(&gpu.parameter(&tensor)?);
        let [x, y, weight] = inputs(5, 24).map(variable);
        let (x, y, weight) = (x?, y?, weight?);
        let (sum, normed) = residual_norm(&x, &y, &weight, EPS)?;
        let of = |result: &Tensor| -> Result<Vec<u32>> {
            let gradients = backward_from::backward(result, &gpu.parameter(&random(result.dims(), 9))?)?;
            Ok([&x, &y].into_iter().flat_map(|x| gradients.get(x).map(bits).expect("a gradient")).collect())
        };
        let (both, alone) = (Tensor::cat(&[&sum, &normed], 0)?, of(&sum)?);
        let first = of(&both)?;
        assert_eq!(of(&sum)?, alone, "of the sum alone");
        assert_eq!(of(&both)?, first, "the same bits");
        assert_ne!(of(&normed)?, alone);
    }
    Ok(())
}

/// The gradients from the residual stream and through the norm are added in f32, and only their sum is rounded.
#[test]
fn gradients_in_bf16_are_rounded_once() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let gpu = rounding(&gpu);
    let (rows, width) = (20, 48);
    // The sums are exact in bf16: multiples of 1/64 below 2.
    let coarse = |seed| (random(&[rows, width], seed) * 64.0)?.round()? / 64.0;
    let (x, y, weight) = (coarse(1)?, coarse(2)?, random(&[width], 3));
    let gradient = |device: &RankDevice| -> Result<Tensor> {
        let x = Var::from_tensor(&device.parameter(&x)?)?;
        let out = both(&x, &device.parameter(&y)?, &device.parameter(&weight)?)?;
        let gradients = backward_from::backward(&out, &device.parameter(&random(out.dims(), 9))?)?;
        Ok(gradients.get(&x).expect("a gradient").clone())
    };
    let (got, wanted) = (gradient(&gpu)?, gradient(&RankDevice::CPU)?);
    assert_within(bound(&gpu), "gradient", &numbers(&got), &numbers(&wanted));
    let wanted = numbers(&wanted.to_dtype(DType::BF16)?);
    let apart = numbers(&got).iter().zip(&wanted).filter(|(got, wanted)| got != wanted).count();
    // A number may be rounded differently because its last bit in f32 differs.
    assert!(apart <= 2, "{apart} of {} numbers are rounded otherwise than once", wanted.len());
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused_by_name() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let [x, y, weight] = inputs(2, 8).map(|tensor| gpu.parameter(&tensor));
    let (x, y, weight) = (x?, y?, weight?);
    let refused = |x: &Tensor, y: &Tensor, weight: &Tensor| {
        residual_norm(x, y, weight, EPS).map(|_| ()).expect_err("does not fit").to_string()
    };
    let half = |tensor: &Tensor| tensor.to_dtype(DType::F16);
    assert!(refused(&half(&x)?, &half(&y)?, &weight).contains("F16"));
    let mixed = refused(&x, &y.to_dtype(DType::BF16)?, &weight);
    assert!(mixed.contains("F32") && mixed.contains("BF16"), "{mixed}");
    assert!(refused(&x, &y.narrow(0, 0, 1)?, &weight).contains("shapes differ"));
    assert!(refused(&x, &y, &weight.narrow(0, 0, 7)?).contains("[8]"));
    Ok(())
}
