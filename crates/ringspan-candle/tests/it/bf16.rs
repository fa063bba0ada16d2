//! Layers on the CPU that compute in bf16: values and gradients equal those in f32 for the same inputs, up to rounding.

use crate::support::{BF16, assert_within, numbers, random};
use candle_core::{DType, Device, Result, Tensor, Var};
use ringspan_candle::activation::{Activation, ClampedSwiglu};
use ringspan_candle::cast::cast;
use ringspan_candle::experts::{ExpertStack, Local, SavedExperts, StackedExpert, mixed_saving};
use ringspan_candle::gated_mlp::{self, gated_mlp};
use ringspan_candle::linear::{linear, linear_recomputed};
use ringspan_candle::loss::{self, IGNORE};
use ringspan_candle::norm::rms_norm;
use ringspan_candle::quantized::{Format, QuantizedMatrix};
use ringspan_candle::residual::{residual, residual_norm};
use ringspan_candle::rope::{RotaryTable, rope};
use ringspan_candle::stored_activation::{Storage, StoredActivation};
use ringspan_candle::swiglu::{geglu, swiglu};
use ringspan_candle::tensor_parallel::NO_TENSOR_PARALLEL;
use ringspan_candle::transfers::{Parameter, ReservedMemory};
use ringspan_candle::{
    Adapter, Expert, Experts, GatedExpert, InputDropout, Precision, RankDevice, Routing, Transfers, Weight,
    backward_from, pool,
};
use std::sync::Arc;

/// A CPU where models compute in bf16.
pub(super) fn rounding() -> RankDevice {
    RankDevice::CPU.computing_in(Precision::Bf16)
}

#[track_caller]
pub(super) fn assert_near(what: &str, got: &[f32], wanted: &[f32]) {
    assert_within(BF16, what, got, wanted);
}

/// The value of `f` in a type, and the gradients of its inputs for one gradient of the value. The last `exact` inputs are f32
/// in either type.
fn results(
    precision: Precision,
    inputs: &[Tensor],
    exact: usize,
    f: &dyn Fn(&[Tensor]) -> Result<Tensor>,
) -> Vec<Vec<f32>> {
    let device = RankDevice::CPU.computing_in(precision);
    let rounded = inputs.len() - exact;
    let of = |(at, x): (usize, &Tensor)| Var::from_tensor(&if at < rounded { device.parameter(x)? } else { x.clone() });
    let vars: Vec<Var> = inputs.iter().enumerate().map(of).collect::<Result<_>>().expect("inputs");
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = f(&tensors).expect("a value");
    assert_eq!(y.dtype(), precision.dtype());
    let d = device.parameter(&random(y.dims(), 99)).expect("a gradient");
    let gradients = backward_from::backward(&y, &d).expect("gradients");
    let of = |var: &Var| {
        let gradient = gradients.get(var.as_tensor());
        assert!(gradient.is_none_or(|d| d.dtype() == var.dtype()), "a gradient has the type of what it is of");
        gradient.map_or_else(|| vec![0.0; var.elem_count()], numbers)
    };
    std::iter::once(numbers(&y)).chain(vars.iter().map(of)).collect()
}

#[track_caller]
fn compare_with(what: &str, inputs: &[Tensor], exact: usize, f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let wanted = results(Precision::F32, inputs, exact, &f);
    let got = results(Precision::Bf16, inputs, exact, &f);
    for (index, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
        assert_near(&format!("{what}: result {index}"), got, wanted);
    }
}

#[track_caller]
fn compare(what: &str, inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    compare_with(what, inputs, 0, f);
}

#[test]
fn linear_layers() {
    for rows in [0, 1, 5, 1030] {
        let (x, weight, bias) = (random(&[rows, 70], 1), random(&[33, 70], 2), random(&[33], 3));
        compare("linear", &[x.clone(), weight.clone()], |x| linear(&x[0], &x[1], None));
        compare("linear with bias", &[x.clone(), weight, bias], |x| linear(&x[0], &x[1], Some(&x[2])));
        let part = random(&[33, 20], 4);
        compare("linear of columns", &[x, part], |x| linear(&x[0].narrow(1, 7, 20)?, &x[1], None));
    }
}

/// The sum of 256 and seven ones is rounded once: rounded after each addition, it would stay 256.
#[test]
fn sums_are_rounded_once() -> Result<()> {
    let row = [&[256f32][..], &[1.0; 7]].concat();
    let x = rounding().parameter(&Tensor::new(row, &Device::Cpu)?.unsqueeze(0)?)?;
    let ones = x.ones_like()?;
    // 263 is halfway between 262 and 264, and the tie goes to the even mantissa of 264.
    assert_eq!(numbers(&linear(&x, &ones, None)?), [264.0]);
    assert_eq!(numbers(&loss::logits(&x, &ones)?), [263.0], "logits are not rounded");
    let bias = Var::from_tensor(&Tensor::zeros(1, DType::BF16, &Device::Cpu)?)?;
    let y = linear(&ones.t()?, &Tensor::ones((1, 1), DType::BF16, &Device::Cpu)?, Some(bias.as_tensor()))?;
    let gradients = backward_from::backward(&y, &x.t()?)?;
    assert_eq!(gradients.get(&bias).map(numbers), Some(vec![264.0]), "the gradient of a bias");
    Ok(())
}

#[test]
fn a_recomputed_linear_layer_returns_the_stored_output() -> Result<()> {
    let (x, weight) = (random(&[7, 12], 1), random(&[5, 12], 2));
    let first = results(Precision::Bf16, &[x.clone(), weight.clone()], 0, &|x| linear(&x[0], &x[1], None));
    for storage in [Storage::F32, Storage::Bf16] {
        let again = results(Precision::Bf16, &[x.clone(), weight.clone()], 0, &|x| {
            let known = StoredActivation::new(&linear(&x[0], &x[1], None)?.detach(), storage)?;
            linear_recomputed(&x[0], &x[1], None, Some(known))
        });
        assert_eq!(first, again);
    }
    let unseen = results(Precision::Bf16, &[x, weight], 0, &|x| linear_recomputed(&x[0], &x[1], None, None));
    assert_eq!(unseen[1..], first[1..]);
    assert_eq!(unseen[0], vec![0.0; 35]);
    Ok(())
}

#[test]
fn norms_rotations_gates_and_sums() {
    for rows in [0, 1, 37] {
        let (x, y) = (random(&[rows, 24], 1), random(&[rows, 24], 2));
        let weight = random(&[24], 3);
        compare("norm", &[x.clone(), weight.clone()], |x| rms_norm(&x[0], &x[1], 1e-5));
        compare_with("norm with a weight of f32", &[x.clone(), weight.clone()], 1, |x| rms_norm(&x[0], &x[1], 1e-5));
        compare("sum", &[x.clone(), y.clone()], |x| residual(&x[0], &x[1]));
        compare_with("sum with f32", &[x.clone(), y.clone()], 1, |x| residual(&x[0], &x[1]));
        compare("sum, normed", &[x.clone(), y.clone(), weight], |x| {
            let (sum, normed) = residual_norm(&x[0], &x[1], &x[2], 1e-5)?;
            residual(&normed, &sum)
        });
        compare("swiglu", &[x.clone(), y.clone()], |x| swiglu(&x[0], &x[1]));
        compare("geglu", &[x.clone(), y.clone()], |x| geglu(&x[0], &x[1]));
        let positions: Vec<usize> = (0..rows).map(|row| 3 * row + 1).collect();
        let rotation = RotaryTable::new(&positions, &[1.0, 0.1, 0.01], 0.9);
        compare("rotation", &[random(&[rows, 4, 6], 5)], |x| rope(&x[0], &rotation));
        let dropout = InputDropout::new(3, (0..rows).collect());
        compare("drop", &[x], |x| dropout.apply(&x[0], 0.3, 2, 1));
    }
}

#[test]
fn the_gated_layer_across_tiles_and_recomputed() {
    for (rows, activation) in
        [(0, Activation::Silu), (3, Activation::GeluTanh), (gated_mlp::TILE + 5, Activation::Silu)]
    {
        let inputs = [random(&[rows, 12], 1), random(&[20, 12], 2), random(&[20, 12], 3), random(&[12, 20], 4)];
        let once = |x: &[Tensor]| gated_mlp(&x[0], &x[1], &x[2], &x[3], activation);
        compare("gated layer", &inputs, once);
        // Stored outputs of either storage type give the results of the first computation.
        for storage in [Storage::F32, Storage::Bf16] {
            let again = |x: &[Tensor]| {
                let weights = [&x[1], &x[2], &x[3]];
                let (out, wide) = gated_mlp::gated_mlp_saving(&x[0], weights, activation, storage)?;
                let known = StoredActivation::new(&out.detach(), storage)?;
                gated_mlp::gated_mlp_recomputed(&x[0], weights, activation, Some(wide), Some(known))
            };
            assert_eq!(results(Precision::Bf16, &inputs, 0, &again), results(Precision::Bf16, &inputs, 0, &once));
        }
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let inputs = [random(&[300, 64], 1), random(&[96, 64], 2), random(&[96, 64], 3), random(&[64, 96], 4)];
    let on = |threads| {
        let f = |x: &[Tensor]| gated_mlp(&rms_norm(&x[0], &x[1].get(0)?, 1e-5)?, &x[1], &x[2], &x[3], Activation::Silu);
        pool::run(threads, || results(Precision::Bf16, &inputs, 0, &f)).expect("threads")
    };
    assert_eq!(on(1), on(3));
}

#[test]
fn the_loss_across_chunks() -> Result<()> {
    let (tokens, width, vocabulary) = (loss::CHUNK + 9, 24, 40);
    let (hidden, head) = (random(&[tokens, width], 1), random(&[vocabulary, width], 2));
    let targets = |skips: bool| -> Vec<u32> {
        let of = |token: usize| if skips && token % 3 == 1 { IGNORE } else { (token * 7 % vocabulary) as u32 };
        (0..tokens).map(of).collect()
    };
    for (skips, softcap) in [(false, None), (true, None), (true, Some(2.0))] {
        let on = |precision| -> Result<_> {
            let device = RankDevice::CPU.computing_in(precision);
            let (hidden, head) = (device.parameter(&hidden)?, device.parameter(&head)?);
            let head = loss::OutputHead { weight: head.into(), softcap };
            let log_probs = loss::log_probs(&hidden, head.clone(), &targets(skips), &NO_TENSOR_PARALLEL)?;
            Ok((loss::head_loss(&hidden, head, &targets(skips), 0.25, true, &NO_TENSOR_PARALLEL)?, log_probs))
        };
        let ((wanted, of_wanted), (got, of_got)) = (on(Precision::F32)?, on(Precision::Bf16)?);
        // The same numbers are multiplied exactly, and summed in f32.
        assert!((wanted.nll_sum - got.nll_sum).abs() < 1e-5 * wanted.nll_sum);
        assert!(of_got.iter().zip(&of_wanted).all(|(a, b)| (a - b).abs() < 1e-5));
        assert_eq!(got.d_hidden.dtype(), DType::BF16);
        assert_near("d_hidden", &numbers(&got.d_hidden), &numbers(&wanted.d_hidden));
        let [got, wanted] = [got, wanted].map(|loss| loss.d_head.expect("trained"));
        assert_eq!(got.dtype(), DType::F32, "the gradient of the head is a sum");
        assert_near("d_head", &numbers(&got), &numbers(&wanted));
    }
    Ok(())
}

/// The experts of five tokens, two for each, out of four experts: expert 1 has four tokens, expert 2 none.
const CHOSEN: [u32; 10] = [0, 1, 1, 3, 3, 1, 0, 3, 1, 0];

/// An expert whose gate and down have adapters of rank 3, which drop two fifths of their inputs.
fn expert(x: &[Tensor], index: usize) -> Result<Expert> {
    let [gate, up, down] = [0, 1, 2].map(|which| x[7 * index + which].clone());
    let adapter = |which: usize, at: usize| {
        let (a, b) = (x[7 * index + at].clone(), x[7 * index + at + 1].clone());
        Some(Adapter { a, b, scale: 0.7, dropout: 0.4, layer: 10 * index + which, first: 0 }.into())
    };
    Ok(GatedExpert { adapters: [adapter(0, 3), None, adapter(2, 5)], ..GatedExpert::plain(gate, up, down) }.into())
}

#[test]
fn mixtures_of_experts_with_adapters() {
    let (width, wide, rank) = (16, 20, 3);
    let mut inputs = vec![random(&[5, width], 1)];
    for index in 0..4 {
        let shapes: [&[usize]; 7] = [
            &[wide, width],
            &[wide, width],
            &[width, wide],
            &[rank, width],
            &[wide, rank],
            &[rank, wide],
            &[width, rank],
        ];
        inputs.extend(shapes.iter().enumerate().map(|(at, shape)| random(shape, 10 + 7 * index + at as u64)));
    }
    // Routing weights are f32.
    inputs.push(random(&[5, 2], 2));
    let dropout = InputDropout::new(7, vec![40, 3, 11, 12, 29]);
    let mix = |x: &[Tensor], memory: &mut SavedExperts| {
        let weights = x[x.len() - 1].clone();
        let routing = Routing { chosen: CHOSEN.to_vec(), weights, adapter_rows: Some(dropout.clone().into()) };
        mixed_saving(&x[0], &routing, &|index| expert(&x[1..], index), memory)
    };
    compare_with("mixture", &inputs, 1, |x| mix(x, &mut SavedExperts::default()));
    let once = results(Precision::Bf16, &inputs, 1, &|x| mix(x, &mut SavedExperts::default()));
    let again = results(Precision::Bf16, &inputs, 1, &|x| {
        let mut memory = SavedExperts::new(Storage::F32);
        mix(x, &mut memory)?;
        mix(x, &mut memory)
    });
    assert_eq!(once[1..], again[1..], "products that are kept are those computed again");
    let none = |precision| {
        let x = [vec![Tensor::zeros((0, width), DType::F32, &Device::Cpu).expect("zeros")], inputs[1..29].to_vec()]
            .concat();
        results(precision, &x, 0, &|x| {
            let weights = Tensor::zeros((0, 2), DType::F32, &Device::Cpu)?;
            let routing = Routing { chosen: Vec::new(), weights, adapter_rows: None };
            Local.mix(0, &x[0], &routing, &|index| expert(&x[1..], index))
        })
    };
    assert_eq!(none(Precision::Bf16), none(Precision::F32));
}

#[test]
fn mixtures_of_stacked_experts() {
    let (experts, width, wide) = (4, 16, 20);
    let activation = ClampedSwiglu { alpha: 1.4, limit: 1.5 };
    let shapes: [&[usize]; 4] =
        [&[experts, width, 2 * wide], &[experts, 2 * wide], &[experts, wide, width], &[experts, width]];
    let mut inputs = vec![random(&[5, width], 1)];
    inputs.extend(shapes.iter().enumerate().map(|(at, shape)| random(shape, 70 + at as u64)));
    // The weights are small, so that few numbers come near the clamping bounds, where rounding may turn a slope to zero.
    inputs[1] = (&inputs[1] * 0.125).expect("a product");
    inputs.push(random(&[5, 2], 2));
    compare_with("stack", &inputs, 1, |x| {
        let [gate_up, gate_up_bias, down, down_bias] = [1, 2, 3, 4].map(|at: usize| x[at].clone());
        let stack = Arc::new(ExpertStack {
            gate_up: gate_up.into(),
            gate_up_bias,
            down: down.into(),
            down_bias,
            activation,
            adds_down_bias: true,
        });
        let routing = Routing { chosen: CHOSEN.to_vec(), weights: x[5].clone(), adapter_rows: None };
        Local.mix(0, &x[0], &routing, &|index| Ok(Expert::Stacked(StackedExpert { stack: stack.clone(), index })))
    });
}

/// A quantized matrix is multiplied in f32; its rows are looked up in the type in which the model computes.
#[test]
fn quantized_matrices_beside_tensors_in_bf16() -> Result<()> {
    let values = numbers(&random(&[6, 32], 3));
    let words: Vec<u8> = values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
    let matrix = QuantizedMatrix::new(Format::BF16, 6, 32, words.into())?.computing_in(Precision::Bf16);
    let weight = Weight::from(matrix);
    let rows = weight.lookup(&[2, 5])?;
    assert_eq!((rows.dtype(), weight.computed_in()), (DType::BF16, DType::BF16));
    assert_eq!(numbers(&rows), [&values[64..96], &values[160..]].concat());
    let (x, dense) = (random(&[4, 32], 1), Tensor::from_vec(values, (6, 32), &Device::Cpu)?);
    let got = results(Precision::Bf16, std::slice::from_ref(&x), 0, &|x| weight.linear(&x[0], None));
    let wanted = results(Precision::F32, &[x], 0, &|x| linear(&x[0], &dense, None));
    for (got, wanted) in got.iter().zip(&wanted) {
        assert_near("quantized", got, wanted);
    }
    Ok(())
}

#[test]
fn a_parameter_is_rounded_once_to_the_nearest() -> Result<()> {
    let third = Tensor::new(&[[1.0f32 / 3.0, -2.0], [1e-30, 5.0]], &Device::Cpu)?;
    let there = rounding().parameter(&third.t()?)?;
    assert_eq!((there.dtype(), there.dims()), (DType::BF16, &[2, 2][..]));
    assert_eq!(numbers(&there), numbers(&third.t()?.to_dtype(DType::BF16)?), "of its elements in its order");
    let parameter = Parameter { parts: vec![&[1.0 / 3.0], &[2.0]], shape: 2.into() };
    let there = &Transfers::new(&rounding()).expect("a way").upload(ReservedMemory::default(), &[parameter])?[0];
    assert!(there.is_variable());
    assert_eq!((there.dtype(), numbers(there)), (DType::BF16, vec![0.333_984_38, 2.0]));
    assert_eq!(rounding().parameter(&third.narrow(0, 0, 0)?)?.dims(), [0, 2]);
    let wide = cast(there, DType::F32)?;
    assert_eq!((wide.dtype(), numbers(&wide)), (DType::F32, numbers(there)));
    Ok(())
}

/// Results in bf16 and f32 differ by less than the bound, but by much more than rounding errors of f32.
#[test]
fn the_bound_tells_bf16_from_f32() {
    let inputs = [random(&[9, 70], 1), random(&[33, 70], 2)];
    let on = |precision| results(precision, &inputs, 0, &|x| linear(&x[0], &x[1], None));
    for (f32, bf16) in on(Precision::F32).iter().zip(&on(Precision::Bf16)) {
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let off = norm(&mut f32.iter().zip(bf16).map(|(a, b)| a - b)) / norm(&mut f32.iter().copied());
        assert!(off > 5e-4 && off < BF16, "{off:e}");
    }
}
