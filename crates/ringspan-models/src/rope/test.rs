use crate::Config;
use ringspan_candle::layers::RotaryEmbedding;
use serde_json::json;

fn frequencies(rope: serde_json::Value) -> Vec<f64> {
    made(rope).frequencies
}

fn made(rope: serde_json::Value) -> RotaryEmbedding {
    let mut config = json!({
        "model_type": "llama", "vocab_size": 8, "hidden_size": 128, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1
    });
    config.as_object_mut().expect("an object").extend(rope.as_object().expect("an object").clone());
    let config: Config = serde_json::from_value(config).expect("sizes");
    super::of_all_layers(&config).expect("supported")
}

fn close(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < 1e-6
}

/// Expected values are from transformers 5.23, for heads of width 128, a base of a million, and a context extended from 32768
/// to 131072 positions: with the defaults, and with every key set.
#[test]
fn yarn_frequencies_equal_hugging_face() {
    let defaults = json!({
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 32768
    });
    let mut fine = defaults.clone();
    let more = json!({ "truncate": false, "beta_fast": 16, "beta_slow": 2, "mscale": 0.707, "mscale_all_dim": 1.2 });
    fine.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    let mut given = defaults.clone();
    given["attention_factor"] = 0.75.into();
    let by_default = [
        (0, 1.0),
        (22, 8.659643121e-03),
        (23, 6.978305988e-03),
        (24, 5.375321489e-03),
        (31, 8.029597811e-04),
        (39, 6.490394298e-05),
        (40, 4.445698505e-05),
        (63, 3.102344408e-07),
    ];
    let finely = [
        (23, 6.978305988e-03),
        (24, 5.623413250e-03),
        (27, 2.898493316e-03),
        (35, 1.894901943e-04),
        (39, 5.516835517e-05),
        (40, 4.445698505e-05),
    ];
    for (rope, scale, wanted) in
        [(&defaults, 1.138629436, &by_default[..]), (&fine, 0.941403524, &finely), (&given, 0.75, &by_default)]
    {
        for rope in [json!({ "rope_parameters": rope }), json!({ "rope_scaling": rope })] {
            let got = made(rope);
            assert!(close(got.scale, scale), "{} for {scale}", got.scale);
            for (i, value) in wanted {
                assert!(close(got.frequencies[*i], *value), "pair {i}: {} for {value}", got.frequencies[*i]);
            }
        }
    }
    // Without a factor, the quotient of the two lengths is used.
    let mut lengths = defaults;
    lengths["factor"] = serde_json::Value::Null;
    let got = made(json!({ "rope_parameters": lengths, "max_position_embeddings": 131_072 }));
    assert!(close(got.frequencies[39], by_default[5].1) && close(got.scale, 1.138629436));
}

/// Expected values are from transformers 5.23, for the rotary embedding of Llama 3.1: frequencies that are kept, blended and
/// scaled.
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
