//! Dropout of adapters' inputs: the same on every mesh, and gradients are those of what was computed.

mod support;

use candle_core::Tensor;
use ringspan::LayoutKind;
use ringspan_models::{Decoder, Lora, TARGETS, Weights};
use support::{Answer, Batch, Spread, assert_equal, load, on_ranks, relative_l2};

/// A model with adapters whose matrices are both there, and which drop a third.
fn adapted(name: &str, targets: &[&str]) -> (Decoder, Weights, Batch) {
    let (decoder, weights, batch, _) = load(name);
    let lora = Lora::new(3, 5.0, targets.iter().map(|t| (*t).to_owned()).collect()).expect("possible");
    let decoder = decoder.with_lora(lora.with_dropout(0.3).expect("possible")).expect("possible");
    let mut weights = decoder.adapted(weights, 7).expect("fits");
    for (name, weight) in weights.iter_mut().filter(|(name, _)| name.ends_with("lora_B.weight")) {
        let pace = 0.1 + name.len() as f32 * 0.01;
        let values = (0..weight.elem_count()).map(|i| (i as f32 * pace).sin() * 0.1).collect::<Vec<_>>();
        *weight = Tensor::from_vec(values, weight.shape(), weight.device()).expect("its size");
    }
    (decoder, weights, batch)
}

fn dropped(seed: u64, (decoder, weights, batch): (&Decoder, &Weights, &Batch), spread: Spread) -> Answer {
    on_ranks(decoder, weights, batch, LayoutKind::Zigzag, Spread { drops: Some(seed), ..spread })
}

#[test]
fn every_mesh_drops_the_same() {
    for (name, targets, ep) in [("qwen3", &TARGETS[..], 1), ("qwen3_moe", &TARGETS[..4], 2)] {
        let (decoder, weights, batch) = adapted(name, targets);
        let all = (&decoder, &weights, &batch);
        let one = dropped(5, all, Spread::default());
        let whole = on_ranks(&decoder, &weights, &batch, LayoutKind::Zigzag, Spread::default());
        let apart = relative_l2(&one.logits, &whole.logits);
        assert!(apart > 1e-3, "{name}: nothing is dropped, logits are {apart:e} apart");
        assert!(relative_l2(&dropped(6, all, Spread::default()).logits, &one.logits) > 1e-3, "{name}: seeds agree");
        for (ring, ulysses, tp) in [(2, 1, 1), (1, 2, 1), (3, 1, 1), (1, 1, 2), (2, 1, 2), (1, 1, 4), (2, 2, 2)] {
            let ep = if (ring * ulysses * tp) % ep == 0 { ep } else { 1 };
            let spread = Spread { ring, ulysses, tp, ep, ..Spread::default() };
            assert_equal(&format!("{name}, {spread:?}"), &dropped(5, all, spread), &one);
        }
    }
}

/// Along each matrix's gradient the loss rises by its length squared.
#[test]
fn gradients_are_the_slopes_of_the_loss_with_what_is_dropped() {
    let (decoder, weights, batch) = adapted("llama", &TARGETS);
    let one = dropped(5, (&decoder, &weights, &batch), Spread::default());
    let whole = on_ranks(&decoder, &weights, &batch, LayoutKind::Zigzag, Spread::default());
    for (name, gradient) in &one.gradients {
        assert!(relative_l2(&whole.gradients[name], gradient) > 1e-2, "{name} does not see what is dropped");
        let square: f64 = gradient.iter().map(|x| f64::from(*x).powi(2)).sum();
        let length = 2e-2 / square.sqrt();
        let moved = |sign: f64| {
            let mut weights = weights.clone();
            let weight = &weights[name];
            let step = Tensor::from_slice(gradient, weight.shape(), weight.device()).expect("its size");
            let moved = (weight + (step * (sign * length)).expect("f32")).expect("its size");
            weights.insert(name.clone(), moved);
            dropped(5, (&decoder, &weights, &batch), Spread::default()).loss
        };
        let slope = (moved(1.0) - moved(-1.0)) / (2.0 * length);
        assert!((slope / square - 1.0).abs() < 2e-2, "{name}: {slope:e} is not {square:e}");
    }
}

/// What is dropped and what grows for it are even: the mean over seeds comes near the loss without.
#[test]
fn the_mean_over_seeds_is_near_what_nothing_dropped_gives() {
    let (decoder, weights, batch) = adapted("llama", &["o_proj", "down_proj"]);
    let all = (&decoder, &weights, &batch);
    let whole = on_ranks(&decoder, &weights, &batch, LayoutKind::Zigzag, Spread::default()).logits;
    let mean_of = |seeds: u64| {
        let mut mean = vec![0.0; whole.len()];
        for seed in 0..seeds {
            let logits = dropped(seed, all, Spread::default()).logits;
            mean.iter_mut().zip(logits).for_each(|(mean, x)| *mean += x / seeds as f32);
        }
        relative_l2(&mean, &whole)
    };
    let (one, many) = (mean_of(1), mean_of(64));
    assert!(many < one / 4.0, "one seed is {one:e} apart, the mean of 64 {many:e}");
}
