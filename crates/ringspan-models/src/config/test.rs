use super::Config;
use crate::{Decoder, Unit};
use ringspan::Mask;
use serde_json::{Value, json};

fn config(model_type: &str, more: Value) -> Config {
    let mut config = json!({
        "model_type": model_type, "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2
    });
    config.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    serde_json::from_value(config).expect("types that fit")
}

/// Refused, with all of these words in the message.
fn refused(config: Config, words: &[&str]) {
    let message = Decoder::new(config).expect_err("must be refused").to_string();
    for word in words {
        assert!(message.contains(word), "'{word}' is not in: {message}");
    }
}

#[test]
fn unsupported_kinds_are_refused_with_what_is_possible() {
    refused(config("gemma3", json!({})), &["gemma3", "llama, qwen2, qwen3, mistral"]);
    refused(config("llama", json!({ "hidden_act": "gelu" })), &["gelu", "silu"]);
    for key in ["rope_type", "type"] {
        let rope = json!({ "rope_scaling": { key: "yarn", "factor": 4.0 } });
        refused(config("qwen2", rope), &["yarn", "default, llama3"]);
    }
    refused(config("llama", json!({ "partial_rotary_factor": 0.5 })), &["partial_rotary_factor", "0.5"]);
    let own = json!({ "rope_parameters": { "sliding_attention": { "rope_theta": 1e4 } } });
    refused(config("qwen3", own), &["sliding_attention"]);
    let kinds = json!({ "layer_types": ["full_attention", "linear_attention", "full_attention"] });
    refused(config("qwen3", kinds), &["linear_attention", "full_attention, sliding_attention"]);
}

#[test]
fn sizes_that_contradict_each_other_are_refused_with_their_numbers() {
    for name in ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"] {
        refused(config("llama", json!({ name: 0 })), &[name, "0"]);
    }
    refused(config("llama", json!({ "num_key_value_heads": 0 })), &["num_key_value_heads"]);
    refused(config("llama", json!({ "head_dim": 0 })), &["head_dim"]);
    refused(config("llama", json!({ "num_key_value_heads": 3 })), &["4", "3"]);
    refused(config("llama", json!({ "hidden_size": 34 })), &["34", "4", "head_dim"]);
    refused(config("llama", json!({ "head_dim": 7 })), &["7", "odd"]);
    refused(config("mistral", json!({ "sliding_window": 0 })), &["sliding_window"]);
    refused(config("llama", json!({ "rope_theta": 0.0 })), &["rope_theta"]);
    refused(config("llama", json!({ "rms_norm_eps": -1.0 })), &["rms_norm_eps", "-1"]);
    refused(config("qwen3", json!({ "layer_types": ["full_attention"] })), &["1 layer_types", "3 layers"]);
}

#[test]
fn llama3_rope_needs_its_numbers() {
    let whole = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192
    });
    assert!(Decoder::new(config("llama", json!({ "rope_scaling": whole.clone() }))).is_ok());
    for key in ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"] {
        let mut part = whole.clone();
        part.as_object_mut().expect("an object").remove(key);
        refused(config("llama", json!({ "rope_scaling": part })), &[key]);
    }
    let mut same = whole;
    same["high_freq_factor"] = 1.0.into();
    refused(config("llama", json!({ "rope_scaling": same })), &["high_freq_factor above low_freq_factor"]);
}

#[test]
fn a_file_with_both_names_of_the_rope_type_is_read() {
    let both = json!({ "rope_scaling": { "rope_type": "default", "type": "default" } });
    assert!(Decoder::new(config("llama", both)).is_ok());
}

#[test]
fn windows_are_of_the_layers_that_hugging_face_gives_them() {
    let windowed = |window: usize| Mask::causal().window(Some(window - 1), None);
    let all = |config: &Config| (0..3).map(|layer| config.mask(layer)).collect::<Vec<_>>();
    let causal = vec![Mask::causal(); 3];

    assert_eq!(all(&config("mistral", json!({ "sliding_window": 9 }))), vec![windowed(9); 3]);
    assert_eq!(all(&config("mistral", json!({ "sliding_window": null }))), causal);
    assert_eq!(all(&config("mistral", json!({}))), vec![windowed(4096); 3], "the default of the absent key");
    assert_eq!(all(&config("llama", json!({ "sliding_window": 9 }))), causal);

    // Qwen's files name a window that is not used.
    assert_eq!(all(&config("qwen2", json!({ "sliding_window": 9, "max_window_layers": 0 }))), causal);
    let used = json!({ "sliding_window": 9, "use_sliding_window": true, "max_window_layers": 2 });
    assert_eq!(all(&config("qwen2", used)), vec![Mask::causal(), Mask::causal(), windowed(9)]);
    let few = json!({ "sliding_window": 9, "use_sliding_window": true });
    assert_eq!(all(&config("qwen3", few)), causal, "from layer 28 on by default");
    let types = json!({
        "sliding_window": 9, "use_sliding_window": true,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
    });
    assert_eq!(all(&config("qwen3", types.clone())), vec![windowed(9), Mask::causal(), windowed(9)]);
    let mut unused = types;
    unused["use_sliding_window"] = false.into();
    refused(config("qwen3", unused), &["layer 0", "use_sliding_window"]);
}

#[test]
fn biases_and_head_norms_are_those_of_the_model() {
    let names = |kind: &str, more: Value| -> Vec<String> {
        let decoder = Decoder::new(config(kind, more)).expect("supported");
        decoder.unit_shapes(Unit::Layer(0)).into_iter().map(|(name, _)| name).collect()
    };
    let count = |names: &[String], end: &str| names.iter().filter(|name| name.ends_with(end)).count();
    assert_eq!(count(&names("llama", json!({})), "bias"), 0);
    assert_eq!(count(&names("llama", json!({ "attention_bias": true })), "bias"), 4);
    assert_eq!(count(&names("llama", json!({ "attention_bias": true, "mlp_bias": true })), "bias"), 7);
    assert_eq!(count(&names("qwen2", json!({})), "bias"), 3);
    assert_eq!(count(&names("mistral", json!({ "attention_bias": true })), "bias"), 0);
    assert_eq!(count(&names("qwen3", json!({ "attention_bias": true })), "bias"), 4);
    assert_eq!(count(&names("qwen3", json!({})), "_norm.weight"), 2);
    assert_eq!(config("qwen3", json!({})).head_dim(), 128);
    assert_eq!(config("qwen2", json!({})).head_dim(), 8);
}
