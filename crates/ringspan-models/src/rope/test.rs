use super::Rope;
use crate::Config;
use serde_json::json;

fn frequencies(rope: serde_json::Value) -> Vec<f64> {
    let mut config = json!({
        "model_type": "llama", "vocab_size": 8, "hidden_size": 128, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1
    });
    config.as_object_mut().expect("an object").extend(rope.as_object().expect("an object").clone());
    let config: Config = serde_json::from_value(config).expect("sizes");
    Rope::new(&config, config.rope(), 10_000.0).expect("supported").frequencies
}

fn close(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < 1e-6
}

/// Values of transformers 5.23 for the rotary embedding of Llama 3.1: kept, blended and stretched ones.
#[test]
fn llama3_frequencies_equal_hugging_face() {
    let parameters = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192
    });
    let mut new = parameters.clone();
    new["rope_theta"] = 500_000.0.into();
    let wanted = [
        (0, 1.0),
        (1, 8.146172166e-01),
        (28, 3.211446106e-03),
        (29, 2.166570630e-03),
        (31, 8.567514597e-04),
        (34, 1.785077911e-04),
        (35, 9.556212171e-05),
        (63, 3.068925878e-07),
    ];
    let spellings = [json!({ "rope_parameters": new }), json!({ "rope_scaling": parameters, "rope_theta": 500_000.0 })];
    for rope in spellings {
        let got = frequencies(rope);
        assert_eq!(got.len(), 64);
        for (i, value) in wanted {
            assert!(close(got[i], value), "pair {i}: {} for {value}", got[i]);
        }
    }
}

#[test]
fn plain_frequencies_fall_from_one_by_the_base() {
    for rope in [json!({}), json!({ "rope_scaling": null }), json!({ "rope_parameters": { "rope_type": "default" } })] {
        let got = frequencies(rope);
        assert!(close(got[0], 1.0) && close(got[32], 1e-2) && close(got[16], 1e-1), "{got:?}");
    }
    assert!(close(frequencies(json!({ "rope_theta": 1e6 }))[32], 1e-3));
    assert!(close(frequencies(json!({ "rope_parameters": { "rope_theta": 1e6 } }))[32], 1e-3));
}
