//! Tests that every operation on a GPU has the values and gradients that it has on the CPU; in bf16, up to rounding.
#![cfg(feature = "cuda")]

#[path = "../support/mod.rs"]
mod support;

mod bf16;
#[cfg(feature = "nccl")]
mod by_nccl;
mod fused;
mod gpu_memory;
mod loss;
mod offload;
mod ranks;
mod residual_norm;
mod stacked;

use candle_core::{DType, Result, Tensor, Var};
use ringspan_candle::activation::Activation;
use ringspan_candle::cast::cast;
use ringspan_candle::experts::{Local, SavedExperts, with_router_gradient};
use ringspan_candle::gated_mlp::{gated_mlp, gated_mlp_recomputed, gated_mlp_saving};
use ringspan_candle::linear::{linear, linear_recomputed};
use ringspan_candle::norm::rms_norm;
use ringspan_candle::residual::residual;
use ringspan_candle::rope::{RotaryTable, rope};
use ringspan_candle::stored_activation::{Storage, StoredActivation};
use ringspan_candle::swiglu::{geglu, swiglu};
use ringspan_candle::{
    Adapter, Expert, Experts, GatedExpert, InputDropout, Precision, RankDevice, Routing, backward_from,
};
use ringspan_cuda::Gpu;
use std::sync::Arc;
use support::{BF16, F32, assert_within, numbers, random};

/// The first GPU; `None` on a machine without one, where a test has nothing to do.
fn gpu() -> Option<RankDevice> {
    if Gpu::count() == Ok(0) {
        println!("skipped: no GPU on this machine");
        return None;
    }
    Some(RankDevice::gpu(0).expect("a GPU that works"))
}

/// The same GPU, where models compute in bf16.
fn rounding(gpu: &RankDevice) -> RankDevice {
    gpu.clone().computing_in(Precision::Bf16)
}

/// The relative error (L2) that is accepted on this device.
fn bound(device: &RankDevice) -> f64 {
    match device.precision() {
        Precision::F32 => F32,
        Precision::Bf16 => BF16,
    }
}

#[track_caller]
fn assert_equal(what: &str, got: &[f32], wanted: &[f32]) {
    assert_within(F32, what, got, wanted);
}

/// The value of `f` on a device, and the gradients of its inputs for one gradient of the value.
fn results(
    device: &RankDevice,
    inputs: &[Tensor],
    f: &dyn Fn(&RankDevice, &[Tensor]) -> Result<Tensor>,
) -> Vec<Vec<f32>> {
    let on = |tensor: &Tensor| device.parameter(tensor);
    let vars: Vec<Var> = inputs.iter().map(|x| Var::from_tensor(&on(x)?)).collect::<Result<_>>().expect("inputs");
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = f(device, &tensors).expect("a value");
    assert!(y.device().same_device(device.tensors()), "the value is on {:?}", y.device());
    assert_eq!(y.dtype(), device.precision().dtype());
    let d = on(&random(y.dims(), 99)).expect("a gradient");
    let gradients = backward_from::backward(&y, &d).expect("gradients");
    let of = |var: &Var| {
        let gradient = gradients.get(var.as_tensor());
        assert!(gradient.is_none_or(|d| d.dtype() == var.dtype()), "a gradient has the type of what it is of");
        gradient.map_or_else(Vec::new, numbers)
    };
    std::iter::once(numbers(&y)).chain(vars.iter().map(of)).collect()
}

fn compare(what: &str, inputs: &[Tensor], f: impl Fn(&RankDevice, &[Tensor]) -> Result<Tensor>) {
    let Some(gpu) = gpu() else { return };
    let wanted = results(&RankDevice::CPU, inputs, &f);
    for gpu in [gpu.clone(), rounding(&gpu)] {
        let got = results(&gpu, inputs, &f);
        for (index, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
            assert!(!wanted.is_empty() || inputs.iter().any(|x| x.elem_count() == 0), "{what} has no result {index}");
            assert_within(bound(&gpu), &format!("{what} in {}, result {index}", gpu.precision()), got, wanted);
        }
    }
}

#[test]
fn linear_layers_with_and_without_bias() {
    let inputs = [random(&[5, 12], 1), random(&[7, 12], 2), random(&[7], 3)];
    compare("linear", &inputs[..2], |_, x| linear(&x[0], &x[1], None));
    compare("linear with bias", &inputs, |_, x| linear(&x[0], &x[1], Some(&x[2])));
    compare("linear of a part", &inputs[..2], |_, x| {
        linear(&x[0].narrow(1, 3, 6)?, &x[1].narrow(1, 0, 6)?.contiguous()?, None)
    });
    compare("linear of no rows", &[random(&[0, 12], 1), inputs[1].clone()], |_, x| linear(&x[0], &x[1], None));
}

#[test]
fn a_layer_that_is_computed_again_has_what_was_kept_and_the_same_gradients() {
    let inputs = [random(&[5, 12], 1), random(&[7, 12], 2), random(&[7], 3)];
    for storage in [Storage::F32, Storage::Bf16] {
        compare("linear again", &inputs, |_, x| {
            let kept = StoredActivation::new(&linear(&x[0], &x[1], Some(&x[2]))?, storage)?;
            linear_recomputed(&x[0], &x[1], Some(&x[2]), Some(kept))
        });
    }
    compare("linear unseen", &inputs[..2], |_, x| linear_recomputed(&x[0], &x[1], None, None));
    let inputs = [random(&[6, 8], 1), random(&[10, 8], 2), random(&[10, 8], 3), random(&[8, 10], 4)];
    for activation in [Activation::Silu, Activation::GeluTanh] {
        compare("gated", &inputs, |_, x| gated_mlp(&x[0], &x[1], &x[2], &x[3], activation));
        for keeps in [false, true] {
            compare("gated again", &inputs, |_, x| {
                let weights = [&x[1], &x[2], &x[3]];
                let (out, wide) = gated_mlp_saving(&x[0], weights, activation, Storage::F32)?;
                let known = StoredActivation::new(&out, Storage::F32)?;
                gated_mlp_recomputed(&x[0], weights, activation, keeps.then_some(wide), keeps.then_some(known))
            });
        }
    }
}

#[test]
fn norms_gates_rotations_and_sums() {
    let (x, y) = (random(&[6, 10], 1), random(&[6, 10], 2));
    for shape in [vec![5, 24], vec![3, 4, 8]] {
        let weight = random(&shape[shape.len() - 1..], 2);
        compare("norm", &[random(&shape, 1), weight], |_, x| rms_norm(&x[0], &x[1], 1e-5));
    }
    compare("swiglu", &[x.clone(), y.clone()], |_, x| swiglu(&x[0], &x[1]));
    compare("geglu", &[x.clone(), y.clone()], |_, x| geglu(&x[0], &x[1]));
    compare("residual", &[x.clone(), y], |_, x| residual(&x[0], &x[1]));
    compare("residual of nothing", &[random(&[0, 4], 1), random(&[0, 4], 1)], |_, x| residual(&x[0], &x[1]));
    let rotation = RotaryTable::new(&[0, 3, 1000, 7], &[1.0, 0.1, 0.003], 1.0);
    compare("rope", &[random(&[4, 2, 6], 1)], |_, x| rope(&x[0], &rotation));
    let dropout = InputDropout::new(5, vec![1, 2, 3, 5, 8, 13]);
    compare("dropout", &[x], |_, x| dropout.apply(&x[0], 0.4, 2, 1));
}

#[test]
fn experts_and_their_router_gradient() {
    mixture(false);
    let router_gradient = Arc::new(std::sync::OnceLock::from(vec![0.5, -1.0, 2.0]));
    compare("pressed", &[random(&[4, 3], 3)], |_, x| {
        cast(&with_router_gradient(&cast(&x[0], DType::F32)?, router_gradient.clone())?, x[0].dtype())
    });
}

#[test]
fn experts_with_adapters_that_drop() {
    mixture(true);
}

fn mixture(adapted: bool) {
    let (tokens, width, inner, experts, top) = (7, 6, 5, 4, 2);
    // No token is routed to one of the experts.
    let chosen: Vec<u32> = (0..tokens * top).map(|slot| [0, 2, 3, 2][(slot * 3) % 4] as u32).collect();
    let mut inputs = vec![random(&[tokens, width], 1), random(&[tokens, top], 2)];
    for expert in 0..experts as u64 {
        inputs.extend([&[inner, width], &[inner, width], &[width, inner]].map(|shape| random(shape, 10 + expert)));
    }
    let rank = 3;
    for which in 0..3 * experts as u64 {
        let (to, from) = if which % 3 == 2 { (width, inner) } else { (inner, width) };
        inputs.extend([random(&[rank, from], 30 + which), random(&[to, rank], 50 + which)]);
    }
    let Some(gpu) = gpu() else { return };
    let dropout = InputDropout::new(7, (0..tokens).map(|token| 3 * token + 1).collect());
    let mix = |again: bool, x: &[Tensor]| -> Result<Tensor> {
        // Routing weights are f32, whatever type the model computes in.
        let weights = cast(&x[1], DType::F32)?;
        let routing =
            Routing { chosen: chosen.clone(), weights, adapter_rows: adapted.then(|| dropout.clone().into()) };
        let expert = |index: usize| {
            let [gate, up, down] = [0, 1, 2].map(|which| x[2 + 3 * index + which].clone());
            let adapter = |which: usize| {
                let at = 2 + 3 * experts + 6 * index + 2 * which;
                let (a, b) = (x[at].clone(), x[at + 1].clone());
                Adapter { a, b, scale: 0.7, dropout: 0.4, layer: 10 * index + which, first: which }.into()
            };
            // One matrix of one expert has no adapter.
            let adapters = [0, 1, 2].map(|which| (adapted && (which != 1 || index != 3)).then(|| adapter(which)));
            Ok(Expert::from(GatedExpert { adapters, ..GatedExpert::plain(gate, up, down) }))
        };
        let mut memory = SavedExperts::new(Storage::F32);
        let first = Local.mix_saving(&mut memory, 0, &x[0], &routing, &expert)?;
        assert!(!memory.is_empty(), "ranks ask whether this is the second time");
        if !again {
            return Ok(first);
        }
        let second = Local.mix_saving(&mut memory, 0, &x[0], &routing, &expert)?;
        assert!(memory.is_empty());
        Ok(second)
    };
    let wanted = results(&RankDevice::CPU, &inputs, &|_, x| mix(false, x));
    for again in [false, true] {
        for gpu in [gpu.clone(), rounding(&gpu)] {
            let got = results(&gpu, &inputs, &|_, x| mix(again, x));
            // The first result is the output, whose values are unspecified when a layer is recomputed.
            for (index, (got, wanted)) in got.iter().zip(&wanted).enumerate().skip(usize::from(again)) {
                let what = format!("experts in {}, again: {again}, result {index}", gpu.precision());
                // An adapter adds two products, each of which is rounded.
                assert_within(bound(&gpu) * if adapted { 2.0 } else { 1.0 }, &what, got, wanted);
            }
        }
    }
}
