//! A rank's memory depends on its own tokens, not on the number of ranks.

use crate::common::{self, tiny_model};
use crate::counting;
use ringspan_models::{Config, Decoder, folder};
use ringspan_train::Settings;
use std::path::Path;

/// Tokens per rank.
const TOKENS: usize = 512;

fn model(root: &Path, layers: usize) {
    let path = tiny_model(root);
    let mut json = common::tiny_config();
    for (key, value) in
        [("hidden_size", 64), ("intermediate_size", 128), ("num_hidden_layers", layers), ("head_dim", 16)]
    {
        json[key] = value.into();
    }
    let decoder = Decoder::new(serde_json::from_value::<Config>(json.clone()).unwrap()).unwrap();
    folder::save(&path, &json, &decoder.init(3).unwrap()).unwrap();
}

/// Peak bytes per rank, with `tokens` tokens on each.
fn peak(root: &Path, (ring, ulysses): (usize, usize), tokens: usize) -> f64 {
    let ranks = ring * ulysses;
    let settings = Settings {
        model: Some(root.join("tiny")),
        data: Some(vec![root.join("text.jsonl")]),
        out: Some(root.join("out")),
        sample_tokens: Some(0),
        sequence_length: Some(tokens * ranks),
        eval_tokens: Some(1),
        ring: Some(ring),
        ulysses: Some(ulysses),
        layout: Some("zigzag".into()),
        // With sharding, a rank's shard of the parameters would shrink as ranks are added.
        sharding: Some("none".into()),
        optimizer: Some("sgd".into()),
        threads: Some(1),
        steps: Some(3),
        save_every: Some(0),
        ..Settings::default()
    };
    let peak = counting::peak(settings);
    (peak.most - peak.before) as f64 / ranks as f64
}

/// Ring and Ulysses ranks before and after doubling.
type Doubled = ((usize, usize), (usize, usize));

#[test]
fn doubling_the_ranks_at_the_same_tokens_a_rank_keeps_its_memory() {
    doubled(&[((2, 1), (4, 1))]);
}

#[test]
#[ignore = "takes a minute"]
fn doubling_the_ranks_of_more_meshes_keeps_their_memory() {
    doubled(&[((4, 1), (8, 1)), ((2, 2), (4, 2))]);
}

fn doubled(meshes: &[Doubled]) {
    let _alone = counting::alone();
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    let line = serde_json::json!({ "text": "abcdefg ".repeat(4000) }).to_string();
    std::fs::write(root.join("text.jsonl"), [line.clone(), line].join("\n")).unwrap();
    let mut each = Vec::new();
    for layers in [4, 8] {
        model(root, layers);
        for &(few, more) in meshes {
            // Whether the ranks' peaks coincide depends on timing: runs that differ are measured again, and the largest peak
            // counts.
            let (mut before, mut after) = (0.0_f64, 0.0_f64);
            for _ in 0..12 {
                before = before.max(peak(root, few, TOKENS));
                after = after.max(peak(root, more, TOKENS));
                if (after / before - 1.0).abs() < 0.05 {
                    break;
                }
            }
            println!("{layers} layers: {before:.0} bytes a rank of ring x ulysses {few:?}, {after:.0} of {more:?}");
            assert!((after / before - 1.0).abs() < 0.05, "{before:.0} bytes a rank of {few:?}, {after:.0} of {more:?}");
        }
        // This is measured on one rank, since the peaks of several need not coincide; and three times, of which the middle one counts,
        // since one in three on a busy machine was a megabyte off.
        let mut of_tokens = [(); 3].map(|()| peak(root, (1, 1), 4 * TOKENS) - peak(root, (1, 1), 2 * TOKENS));
        of_tokens.sort_by(f64::total_cmp);
        each.push(of_tokens[1]);
    }
    // A layer stores its input, attention's output and the softmax's maximum and sum: C + H (D + 2) numbers per token.
    let (of_token, expected) = ((each[1] - each[0]) / (4 * 2 * TOKENS) as f64, 4.0 * (64 + 4 * 18) as f64);
    println!("{of_token:.0} bytes a token and layer, by the formula {expected:.0}");
    assert!((of_token / expected - 1.0).abs() < 0.1, "{of_token:.0} bytes a token and layer, not {expected:.0}");
}
