//! Tests of errors: calls that cannot be computed say what is wrong.

use crate::support::load;
use candle_core::Tensor;
use ringspan::{Mask, Score};
use ringspan_candle::experts::Local;
use ringspan_candle::gradients::loss_and_gradients;
use ringspan_candle::tensor_parallel::NO_TENSOR_PARALLEL;
use ringspan_candle::{Attend, AttentionInputs, Experts, InputDropout, Recompute, TensorParallel, Unit, Weights};
use ringspan_models::{Decoder, Error, TokenBatch};

/// Attention that ignores queries and keys.
struct Values(Vec<usize>);

impl Attend for Values {
    fn layer_attention(&self, _: usize, inputs: &AttentionInputs, _: &Mask, _: &Score) -> candle_core::Result<Tensor> {
        Ok(inputs.q.clone())
    }

    fn positions(&self) -> &[usize] {
        &self.0
    }

    fn length(&self) -> usize {
        self.0.len()
    }

    fn experts(&self) -> &dyn Experts {
        &Local
    }

    fn tensor_parallel(&self) -> &TensorParallel {
        &NO_TENSOR_PARALLEL
    }

    fn input_dropout(&self) -> Option<&InputDropout> {
        None
    }
}

fn gradients_of(
    decoder: &Decoder,
    weights: &Weights,
    tokens: &[u32],
    targets: &[u32],
    positions: usize,
) -> candle_core::Result<f64> {
    let attend = Values((0..positions).collect());
    let batch = TokenBatch { tokens, targets, scale: 1.0 };
    loss_and_gradients(decoder, weights, &batch, Recompute::default(), &attend, &mut |_, _| Ok(()))
}

fn contains(error: candle_core::Error, words: &[&str]) {
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "'{word}' is not in: {message}");
    }
}

#[test]
fn tokens_and_targets_outside_the_vocabulary_are_named() {
    let (decoder, weights, ..) = load("llama");
    assert!(gradients_of(&decoder, &weights, &[1, 95], &[95, 1], 2).is_ok());
    contains(gradients_of(&decoder, &weights, &[1, 96], &[1, 1], 2).expect_err("no such token"), &["96"]);
    contains(gradients_of(&decoder, &weights, &[1, 2], &[97, 1], 2).expect_err("no such target"), &["97", "96"]);
}

#[test]
fn tokens_targets_and_positions_must_have_equal_lengths() {
    let (decoder, weights, ..) = load("llama");
    contains(gradients_of(&decoder, &weights, &[1, 2], &[1], 2).expect_err("a target too few"), &["1 targets"]);
    contains(gradients_of(&decoder, &weights, &[1, 2], &[1, 2], 3).expect_err("a position too many"), &["3 tokens"]);
}

#[test]
fn a_missing_parameter_is_named_with_its_shape() {
    let (decoder, weights, ..) = load("qwen2");
    for (name, shape) in [
        ("model.embed_tokens.weight", "[96, 32]"),
        ("lm_head.weight", "[96, 32]"),
        ("model.norm.weight", "[32]"),
        ("model.layers.1.self_attn.k_proj.bias", "[16]"),
        ("model.layers.0.mlp.down_proj.weight", "[32, 48]"),
    ] {
        let mut weights = weights.clone();
        weights.remove(name);
        contains(gradients_of(&decoder, &weights, &[1], &[2], 1).expect_err("incomplete"), &[name, shape]);
    }
}

#[test]
fn an_error_of_the_callback_ends_the_pass() {
    let (decoder, weights, ..) = load("llama");
    let mut calls = 0;
    let error = loss_and_gradients(
        &decoder,
        &weights,
        &TokenBatch { tokens: &[1], targets: &[2], scale: 1.0 },
        Recompute::Full,
        &Values(vec![0]),
        &mut |unit, _| {
            calls += 1;
            if unit == Unit::Layer(1) { Err(candle_core::Error::wrap(Error::Config("enough".into()))) } else { Ok(()) }
        },
    );
    contains(error.expect_err("the callback's"), &["enough"]);
    assert_eq!(calls, 2, "the head, and the last layer");
}

/// A load-balancing loss in config.json is not left out silently.
#[test]
fn a_load_balancing_loss_needs_experts_that_compute_it() {
    let (decoder, weights, ..) = load("qwen3_moe_balanced");
    let words = ["output_router_logits", "0.5", "false"];
    contains(gradients_of(&decoder, &weights, &[1], &[2], 1).expect_err("not balanced"), &words);
    let (decoder, weights, ..) = load("qwen3_moe");
    assert!(gradients_of(&decoder, &weights, &[1], &[2], 1).is_ok());
}
