//! Random tensors, and comparisons of results with bounds for f32 and bf16.
#![allow(dead_code)] // Each test program uses a part of it.

pub(crate) mod whole_sequences;

use candle_core::{DType, Device, Tensor};
use ringspan_candle::cast::cast;

/// Random numbers in -1..1 that are exact in bf16, so that results in f32 and bf16 differ only by rounding inside the
/// computation.
pub(crate) fn random(shape: &[usize], seed: u64) -> Tensor {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        half::bf16::from_f64((state >> 11) as f64 / (1u64 << 52) as f64 - 1.0).to_f32()
    };
    next();
    Tensor::from_vec((0..shape.iter().product()).map(|_| next()).collect::<Vec<_>>(), shape, &Device::Cpu)
        .expect("sizes")
}

/// The elements of a tensor as f32.
pub(crate) fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().and_then(|tensor| cast(&tensor, DType::F32)?.to_vec1()).expect("numbers")
}

/// The relative error (L2) that is accepted in f32, where sums are added in another order.
pub(crate) const F32: f64 = 2e-6;

/// The relative error (L2) that is accepted in bf16: it rounds a number by up to 2^-9 of itself, and a layer in these tests
/// rounds at most four times in succession, counting its inputs, its outputs and what is passed between its products.
pub(crate) const BF16: f64 = 8e-3;

/// Checks that the relative error (L2) is at most `bound`.
#[track_caller]
pub(crate) fn assert_within(bound: f64, what: &str, got: &[f32], wanted: &[f32]) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    let norm: f64 = wanted.iter().map(|x| f64::from(*x).powi(2)).sum();
    let off: f64 = got.iter().zip(wanted).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
    // The comparison fails for NaN.
    assert!(off.sqrt() <= bound * norm.sqrt(), "{what} differs by {:e}", (off / norm).sqrt());
}
