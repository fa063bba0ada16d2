//! Dropout of adapters' inputs drops the same elements on every mesh, and gradients match the loss with these elements
//! dropped.

use crate::support::{Answer, Batch, TestMesh, adapted, assert_equal, on_ranks, relative_l2};
use candle_core::Tensor;
use ringspan::LayoutKind;
use ringspan_candle::Weights;
use ringspan_models::{Decoder, ROUTER, TARGETS};

fn dropped(seed: u64, (decoder, weights, batch): (&Decoder, &Weights, &Batch), test_mesh: TestMesh) -> Answer {
    on_ranks(decoder, weights, batch, LayoutKind::Zigzag, TestMesh { dropout: Some(seed), ..test_mesh })
}

#[test]
fn every_mesh_drops_the_same() {
    let latent = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "up_proj", "down_proj"];
    for (name, targets, ep) in [("qwen3", TARGETS, 1), ("qwen3_moe", TARGETS, 2), ("deepseek_v3", latent, 2)] {
        let (decoder, weights, batch) = adapted(name, &targets, 0.3);
        let all = (&decoder, &weights, &batch);
        let one = dropped(5, all, TestMesh::default());
        let whole = on_ranks(&decoder, &weights, &batch, LayoutKind::Zigzag, TestMesh::default());
        let apart = relative_l2(&one.logits, &whole.logits);
        assert!(apart > 1e-3, "{name}: nothing is dropped, logits are {apart:e} apart");
        assert!(relative_l2(&dropped(6, all, TestMesh::default()).logits, &one.logits) > 1e-3, "{name}: seeds agree");
        for (ring, ulysses, tp) in [(2, 1, 1), (1, 2, 1), (3, 1, 1), (1, 1, 2), (2, 1, 2), (1, 1, 4), (2, 2, 2)] {
            let ep = if (ring * ulysses * tp) % ep == 0 { ep } else { 1 };
            let test_mesh = TestMesh { ring, ulysses, tp, ep, ..TestMesh::default() };
            assert_equal(&format!("{name}, {test_mesh:?}"), &dropped(5, all, test_mesh), &one);
        }
    }
}

/// For this many tokens, one rank computes the gated layers in three tiles, and several ranks in fewer tiles each.
#[test]
fn tiles_of_a_long_sequence_drop_the_same_as_ranks_that_need_one() {
    for (name, targets) in [("llama", TARGETS.as_slice()), ("phi3", &["qkv_proj", "gate_up_proj", "down_proj"])] {
        let (decoder, weights, short) = adapted(name, targets, 0.3);
        let tokens: Vec<u32> = short.tokens.iter().copied().cycle().take(2500).collect();
        let batch = Batch { rows: 1, len: tokens.len(), tokens };
        let one = dropped(5, (&decoder, &weights, &batch), TestMesh::default());
        for (ring, tp) in [(4, 1), (2, 2)] {
            let test_mesh = TestMesh { ring, tp, ..TestMesh::default() };
            assert_equal(&format!("{name}, {test_mesh:?}"), &dropped(5, (&decoder, &weights, &batch), test_mesh), &one);
        }
    }
}

/// Experts and their router, sharded whole or by their width: tokens travel to other ranks, and the same elements are dropped.
#[test]
fn experts_drop_the_same_wherever_they_are() {
    let targets = ["o_proj", "gate_proj", "up_proj", "down_proj", ROUTER];
    let (decoder, weights, batch) = adapted("qwen3_moe", &targets, 0.3);
    let one = dropped(5, (&decoder, &weights, &batch), TestMesh::default());
    for (ring, ulysses, tp, ep, moe_tp) in [
        (3, 1, 1, 3, 1),
        (2, 1, 1, 1, 2),
        (2, 2, 1, 2, 2),
        (1, 1, 2, 1, 2),
        (2, 1, 2, 2, 2),
        (1, 1, 2, 2, 1),
        (1, 1, 4, 1, 4),
    ] {
        let test_mesh = TestMesh { ring, ulysses, tp, ep, moe_tp, ..TestMesh::default() };
        assert_equal(&format!("{test_mesh:?}"), &dropped(5, (&decoder, &weights, &batch), test_mesh), &one);
    }
}

/// Some ranks have no tokens, and compute what others drop.
#[test]
fn ranks_without_tokens_drop_what_others_would() {
    let targets = ["gate_proj", "up_proj", "down_proj", ROUTER];
    let (decoder, weights, whole) = adapted("qwen3_moe", &targets, 0.3);
    let short = Batch { tokens: whole.tokens[..3].to_vec(), rows: 1, len: 3 };
    let of = |test_mesh| {
        on_ranks(&decoder, &weights, &short, LayoutKind::Contiguous, TestMesh { dropout: Some(5), ..test_mesh })
    };
    let one = of(TestMesh::default());
    for (ring, tp, ep, moe_tp) in [(6, 1, 3, 2), (4, 1, 1, 4), (2, 4, 2, 4)] {
        let test_mesh = TestMesh { ring, tp, ep, moe_tp, ..TestMesh::default() };
        assert_equal(&format!("3 tokens, {test_mesh:?}"), &of(test_mesh), &one);
    }
}

/// Along the gradient of each matrix, the slope of the loss must be the gradient's squared length.
#[test]
fn gradients_are_the_slopes_of_the_loss_under_dropout() {
    let (decoder, weights, batch) = adapted("llama", &TARGETS, 0.3);
    let one = dropped(5, (&decoder, &weights, &batch), TestMesh::default());
    let whole = on_ranks(&decoder, &weights, &batch, LayoutKind::Zigzag, TestMesh::default());
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
            dropped(5, (&decoder, &weights, &batch), TestMesh::default()).loss
        };
        let slope = (moved(1.0) - moved(-1.0)) / (2.0 * length);
        assert!((slope / square - 1.0).abs() < 2e-2, "{name}: {slope:e} is not {square:e}");
    }
}

/// Dropout rescales the remaining elements: the mean loss over seeds comes near the loss without dropout.
#[test]
fn the_mean_over_seeds_is_near_the_result_without_dropout() {
    let (decoder, weights, batch) = adapted("llama", &["o_proj", "down_proj"], 0.3);
    let all = (&decoder, &weights, &batch);
    let whole = on_ranks(&decoder, &weights, &batch, LayoutKind::Zigzag, TestMesh::default()).logits;
    let mean_of = |seeds: u64| {
        let mut mean = vec![0.0; whole.len()];
        for seed in 0..seeds {
            let logits = dropped(seed, all, TestMesh::default()).logits;
            mean.iter_mut().zip(logits).for_each(|(mean, x)| *mean += x / seeds as f32);
        }
        relative_l2(&mean, &whole)
    };
    let (one, many) = (mean_of(1), mean_of(64));
    assert!(many < one / 4.0, "one seed is {one:e} apart, the mean of 64 {many:e}");
}
