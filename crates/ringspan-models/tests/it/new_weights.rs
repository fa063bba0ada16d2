//! New weights follow Hugging Face's initialisation, and do not depend on which rows are read together.

use candle_core::Tensor;
use ringspan_candle::Weights;
use ringspan_models::{Decoder, NewWeights};
use serde_json::{Value, json};

fn decoder(more: Value) -> Decoder {
    let mut config = json!({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    });
    config.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    Decoder::new(serde_json::from_value(config).expect("sizes")).expect("supported")
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().and_then(|t| t.to_vec1()).expect("f32")
}

fn bits(weights: &Weights) -> Vec<u32> {
    weights.values().flat_map(flat).map(f32::to_bits).collect()
}

#[test]
fn the_same_seed_gives_the_same_weights() {
    let decoder = decoder(json!({}));
    let [a, b, c] = [3, 3, 4].map(|seed| bits(&decoder.init(seed).expect("weights")));
    assert_eq!(a, b);
    assert_ne!(a, c);
}

#[test]
fn a_part_is_that_of_the_whole() {
    let decoder = decoder(json!({ "attention_bias": true, "tie_word_embeddings": false }));
    let whole = decoder.init(5).expect("weights");
    let new = NewWeights::new(&decoder, 5).expect("weights");
    for (name, tensor) in &whole {
        let (rows, all) = (tensor.dims()[0], flat(tensor));
        let width = all.len() / rows;
        for part in [0..rows, 0..1, rows / 3..rows - 1, rows..rows] {
            let got = new.read(name, part.clone()).expect("there");
            assert_eq!(got.dims()[0], part.len(), "{name}");
            assert_eq!(flat(&got), all[part.start * width..part.end * width], "{name}");
        }
        let message = new.read(name, 1..rows + 1).expect_err("too many rows").to_string();
        assert!(message.contains(name), "{message}");
    }
    assert!(new.read("nothing", 0..1).expect_err("none").to_string().contains("nothing"));
}

/// Norms of Llama and Qwen are 1, Gemma's are 0, to which it adds 1; embeddings, heads, routers and experts are initialised
/// like other matrices.
#[test]
fn matrices_have_the_deviation_of_the_configuration_and_norms_change_nothing() {
    let sparse = json!({
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "tie_word_embeddings": false, "initializer_range": 0.1,
    });
    for (more, deviation, norm) in [
        (json!({ "model_type": "qwen2", "attention_bias": true }), 0.02, 1.0),
        (json!({ "initializer_range": null }), 0.02, 1.0),
        (json!({ "model_type": "gemma3_text", "initializer_range": 0.006 }), 0.006, 0.0),
        (sparse, 0.1, 1.0),
    ] {
        for (name, tensor) in decoder(more.clone()).init(3).expect("weights") {
            let values = flat(&tensor);
            if tensor.rank() == 1 {
                let constant = if name.ends_with(".bias") { 0.0 } else { norm };
                assert!(values.iter().all(|x| *x == constant), "{name} of {more}");
                continue;
            }
            let count = values.len() as f64;
            let square = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / count;
            let mean = values.iter().map(|x| f64::from(*x)).sum::<f64>() / count;
            // The bounds are four standard deviations of the estimates from this many draws.
            assert!((square.sqrt() / deviation - 1.0).abs() < 4.0 / (2.0 * count).sqrt(), "{name} of {more}");
            assert!(mean.abs() < 4.0 * deviation / count.sqrt(), "{name} of {more}");
        }
    }
}

#[test]
fn a_deviation_without_anything_to_learn_from_is_refused() {
    for range in [0.0, -0.02] {
        let message = decoder(json!({ "initializer_range": range })).init(1).expect_err("refused").to_string();
        assert!(message.contains("initializer_range is") && message.contains("above 0"), "{message}");
    }
}
