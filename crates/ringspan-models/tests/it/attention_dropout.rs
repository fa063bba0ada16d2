//! Tests of attention dropout in training: it equals a mask on the attention weights, the same on every mesh.

use crate::support::{
    Batch, TestMesh, assert_equal, fixture, load, on_one_device, on_one_device_dropping, on_ranks, relative_l2,
};
use ringspan::LayoutKind;
use ringspan_candle::Weights;
use ringspan_models::{Decoder, folder};
use serde_json::json;

const SEED: u64 = 5;

/// A fixture's model with `attention_dropout` in its configuration.
fn dropping(name: &str, share: f64) -> (Decoder, Weights, Batch) {
    let (_, weights, batch, _) = load(name);
    let mut json = folder::config_json(&fixture(name)).expect("the fixture");
    json["attention_dropout"] = json!(share);
    (Decoder::new(serde_json::from_value(json).expect("a config")).expect("supported"), weights, batch)
}

/// The reference multiplies all attention weights after the softmax by a mask of 0 and 1 / (1 - p), in candle's own operations.
#[test]
fn every_mesh_drops_the_weights_that_a_mask_would() {
    for (name, ep) in [("llama", 1), ("gemma3", 1), ("qwen3_moe", 2)] {
        let (decoder, weights, batch) = dropping(name, 0.3);
        let (wanted, _) = on_one_device_dropping(&decoder, &weights, &batch, Some(SEED));
        let (whole, _) = on_one_device(&decoder, &weights, &batch);
        let apart = relative_l2(&wanted.logits, &whole.logits);
        assert!(apart > 1e-2, "{name}: nothing is dropped, logits are {apart:e} apart");
        let (other, _) = on_one_device_dropping(&decoder, &weights, &batch, Some(SEED + 1));
        assert!(relative_l2(&other.logits, &wanted.logits) > 1e-2, "{name}: seeds agree");
        for (ring, ulysses, tp) in [(1, 1, 1), (3, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 1, 4)] {
            let ep = if (ring * ulysses * tp) % ep == 0 { ep } else { 1 };
            let test_mesh = TestMesh { ring, ulysses, tp, ep, dropout: Some(SEED), ..TestMesh::default() };
            let got = on_ranks(&decoder, &weights, &batch, LayoutKind::Zigzag, test_mesh);
            assert_equal(&format!("{name}, {test_mesh:?}"), &got, &wanted);
        }
    }
}

/// Ranks without tokens compute heads of other ranks' tokens, and drop the weights that these would drop.
#[test]
fn ranks_without_tokens_drop_what_others_would() {
    let (decoder, weights, whole) = dropping("llama", 0.3);
    let short = Batch { tokens: whole.tokens[..3].to_vec(), rows: 1, len: 3 };
    let (wanted, _) = on_one_device_dropping(&decoder, &weights, &short, Some(SEED));
    for (ring, ulysses, tp) in [(4, 1, 1), (1, 4, 1), (2, 2, 1), (4, 1, 2)] {
        let test_mesh = TestMesh { ring, ulysses, tp, dropout: Some(SEED), ..TestMesh::default() };
        let got = on_ranks(&decoder, &weights, &short, LayoutKind::Contiguous, test_mesh);
        assert_equal(&format!("3 tokens, {test_mesh:?}"), &got, &wanted);
    }
}

/// Without a training's seed, nothing is dropped.
#[test]
fn without_dropout_the_model_is_unchanged() {
    let (decoder, weights, batch) = dropping("llama", 0.3);
    let (plain, ..) = load("llama");
    assert_eq!(on_one_device(&decoder, &weights, &batch).0.logits, on_one_device(&plain, &weights, &batch).0.logits);
}
