use super::Config;
use crate::Decoder;
use ringspan::Mask;
use ringspan_candle::Unit;
use serde_json::{Value, json};

fn mask(config: &Config, layer: usize) -> Mask {
    Decoder::new(config.clone()).expect("supported").mask(layer).clone()
}

fn config(model_type: &str, more: Value) -> Config {
    let mut config = json!({
        "model_type": model_type, "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2
    });
    config.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    serde_json::from_value(config).expect("types that fit")
}

/// Checks that the configuration is refused, with all of these words in the message.
fn refused(config: Config, words: &[&str]) {
    let message = Decoder::new(config).expect_err("must be refused").to_string();
    for word in words {
        assert!(message.contains(word), "'{word}' is not in: {message}");
    }
}

#[test]
fn unsupported_kinds_are_refused_with_what_is_possible() {
    refused(
        config("mamba", json!({})),
        &["mamba", "llama, qwen2, qwen3, qwen3_moe, mistral, mixtral, gemma2, gemma3_text, glm4"],
    );
    refused(config("llama", json!({ "hidden_act": "gelu" })), &["gelu", "silu"]);
    for key in ["rope_type", "type"] {
        let rope = |kind: &str| json!({ "rope_scaling": { key: kind, "factor": 4.0 } });
        refused(config("qwen2", rope("su")), &["su", "default, linear, dynamic, llama3, yarn, longrope"]);
        refused(config("llama", rope("longrope")), &["longrope", "short_factor", "missing"]);
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
    let endless = config("llama", json!({ "num_hidden_layers": 1u64 << 60 }));
    refused(endless, &["num_hidden_layers", "1152921504606846976", "65536"]);
    refused(config("qwen3_moe", json!({ "num_experts": 1u64 << 60 })), &["num_experts", "65536"]);
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
fn scaled_ropes_need_their_numbers() {
    let rope = |kind: &str, more: Value| {
        let mut rope = json!({ "rope_type": kind });
        rope.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        config("llama", json!({ "rope_scaling": rope }))
    };
    refused(rope("linear", json!({})), &["linear", "factor", "None"]);
    refused(rope("linear", json!({ "factor": 0.0 })), &["linear", "factor", "0"]);
    refused(rope("dynamic", json!({ "factor": 2.0 })), &["dynamic", "max_position_embeddings"]);
    refused(rope("yarn", json!({ "factor": 2.0 })), &["yarn", "original_max_position_embeddings"]);
    let original = "original_max_position_embeddings";
    refused(rope("yarn", json!({ original: 64 })), &["yarn", "factor"]);
    refused(rope("yarn", json!({ original: 64, "factor": 2, "beta_fast": 1, "beta_slow": 3 })), &["1", "3"]);
    refused(rope("yarn", json!({ original: 64, "factor": 2, "attention_factor": -1 })), &["attention_factor", "-1"]);
    assert!(Decoder::new(rope("yarn", json!({ original: 64, "factor": 2 }))).is_ok());
}

#[test]
fn a_file_with_both_names_of_the_rope_type_is_read() {
    let both = json!({ "rope_scaling": { "rope_type": "default", "type": "default" } });
    assert!(Decoder::new(config("llama", both)).is_ok());
}

#[test]
fn attention_dropout_is_a_share() {
    let of = |share: Value| config("llama", json!({ "attention_dropout": share }));
    for (share, rate) in [(json!(null), 0.0), (json!(0), 0.0), (json!(0.25), 0.25)] {
        assert!(Decoder::new(of(share.clone())).is_ok(), "{share}");
        assert_eq!(of(share).attention_dropout(), rate);
    }
    for share in [-0.1, 1.0, 0.99999999] {
        refused(of(json!(share)), &["attention_dropout", &share.to_string(), "below 1"]);
    }
}

#[test]
fn windows_are_of_the_layers_that_hugging_face_gives_them() {
    let windowed = |window: usize| Mask::causal().window(Some(window - 1), None);
    let all = |config: &Config| (0..3).map(|layer| mask(config, layer)).collect::<Vec<_>>();
    let causal = vec![Mask::causal(); 3];

    assert_eq!(all(&config("mistral", json!({ "sliding_window": 9 }))), vec![windowed(9); 3]);
    assert_eq!(all(&config("mistral", json!({ "sliding_window": null }))), causal);
    assert_eq!(all(&config("mistral", json!({}))), vec![windowed(4096); 3], "the default of the absent key");
    assert_eq!(all(&config("llama", json!({ "sliding_window": 9 }))), causal);

    // Configurations of Qwen name a window even if it is not used.
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

#[test]
fn every_sixth_gemma_layer_is_global() {
    let gemma = |more: Value| {
        let mut all = json!({ "head_dim": 8, "num_hidden_layers": 7, "sliding_window": 5 });
        all.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        config("gemma3_text", all)
    };
    let global = |config: Config| (0..7).filter(|layer| mask(&config, *layer) == Mask::causal()).collect::<Vec<_>>();
    assert_eq!(global(gemma(json!({}))), [5]);
    assert_eq!(global(gemma(json!({ "sliding_window_pattern": 3 }))), [2, 5]);
    assert_eq!(global(gemma(json!({ "_sliding_window_pattern": 4 }))), [3]);
    assert!(gemma(json!({})).tie_word_embeddings, "as its files leave out");
    refused(gemma(json!({ "sliding_window_pattern": 0 })), &["sliding_window_pattern"]);
    refused(gemma(json!({ "sliding_window": null })), &["layer 0", "sliding_window"]);
    refused(gemma(json!({ "final_logit_softcapping": 30.0 })), &["final_logit_softcapping", "30", "null"]);
    refused(gemma(json!({ "attn_logit_softcapping": 50.0 })), &["attn_logit_softcapping", "50", "null"]);
    refused(gemma(json!({ "use_bidirectional_attention": true })), &["use_bidirectional_attention"]);
    refused(gemma(json!({ "hidden_activation": "silu" })), &["silu", "gelu_pytorch_tanh"]);
    refused(gemma(json!({ "query_pre_attn_scalar": 0 })), &["query_pre_attn_scalar"]);
}

/// Like the multimodal files of Gemma 3: the sizes of the language model are below `text_config`, and some are left out.
#[test]
fn the_language_model_of_a_vision_model_is_read() {
    let json = json!({
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": { "hidden_size": 3 },
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 1024
        }
    });
    let config: Config = serde_json::from_value(json).expect("the text's part");
    assert_eq!((config.model_type.as_str(), config.hidden_size, config.vocab_size), ("gemma3_text", 2560, 262_208));
    assert_eq!((config.num_attention_heads, config.num_key_value_heads(), config.head_dim()), (8, 4, 256));
    assert!(config.check().is_ok());
    assert_eq!(mask(&config, 0), Mask::causal().window(Some(1023), None));
}

#[test]
fn sparse_layers_are_those_that_hugging_face_gives_experts() {
    let moe = |more: Value| {
        let mut all = json!({ "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8 });
        all.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        config("qwen3_moe", all)
    };
    let sparse = |config: Config| {
        let shapes = Decoder::new(config).expect("supported").shapes();
        let sparse = |layer: &usize| shapes.contains_key(&format!("model.layers.{layer}.mlp.gate.weight"));
        (0..3).filter(sparse).collect::<Vec<_>>()
    };
    assert_eq!(sparse(moe(json!({}))), [0, 1, 2]);
    assert_eq!(sparse(moe(json!({ "decoder_sparse_step": 2 }))), [1]);
    assert_eq!(sparse(moe(json!({ "mlp_only_layers": [0, 2] }))), [1]);
    assert_eq!(sparse(moe(json!({ "num_experts": 0 }))), [0; 0]);
    refused(moe(json!({ "num_experts_per_tok": 5 })), &["num_experts_per_tok is 5", "1 to 4"]);
    refused(moe(json!({ "num_experts_per_tok": 0 })), &["num_experts_per_tok is 0"]);
    refused(moe(json!({ "moe_intermediate_size": 0 })), &["moe_intermediate_size"]);
    refused(moe(json!({ "decoder_sparse_step": 0 })), &["decoder_sparse_step"]);
    refused(moe(json!({ "mlp_only_layers": [3] })), &["layer 3 of 3"]);

    assert_eq!(moe(json!({ "router_aux_loss_coef": 0.5 })).router_aux_loss(), None, "Hugging Face asks for the logits");
    assert_eq!(moe(json!({ "router_aux_loss_coef": 0.5, "output_router_logits": true })).router_aux_loss(), Some(0.5));
    assert_eq!(moe(json!({ "output_router_logits": true })).router_aux_loss(), Some(0.001));
}

#[test]
fn unsupported_settings_of_deepseek_are_refused() {
    let of = |version: &str, more: Value| {
        let mut keys = json!({ "num_key_value_heads": 4, "num_experts_per_tok": 2, "n_routed_experts": 6, "n_group": 2,
            "topk_group": 1 });
        keys.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        config(version, keys)
    };
    for version in ["deepseek_v2", "deepseek_v3"] {
        assert!(Decoder::new(of(version, json!({}))).is_ok(), "{version}");
        refused(of(version, json!({ "num_key_value_heads": 2 })), &["num_key_value_heads is 2", "4"]);
        refused(of(version, json!({ "moe_layer_freq": 2 })), &["moe_layer_freq is 2", "1"]);
        refused(of(version, json!({ "mlp_bias": true })), &["mlp_bias", "false"]);
        refused(of(version, json!({ "kv_lora_rank": 0 })), &["kv_lora_rank is 0"]);
        refused(of(version, json!({ "num_experts_per_tok": 7 })), &["num_experts_per_tok is 7", "n_routed_experts 6"]);
        refused(of(version, json!({ "topk_method": "random" })), &["topk_method is 'random'", version]);
        refused(of(version, json!({ "qk_rope_head_dim": 7 })), &["7", "odd"]);
    }
    refused(of("deepseek_v2", json!({ "norm_topk_prob": true })), &["norm_topk_prob true", "false"]);
    refused(of("deepseek_v2", json!({ "scoring_func": "sigmoid" })), &["scoring_func 'sigmoid'", "softmax"]);
    refused(of("deepseek_v3", json!({ "n_group": 4 })), &["n_group is 4", "6 experts"]);
    refused(of("deepseek_v3", json!({ "topk_group": 3 })), &["topk_group 3"]);
    refused(of("deepseek_v3", json!({ "n_group": 6, "topk_group": 2 })), &["at least 2"]);
    refused(of("deepseek_v3", json!({ "num_experts_per_tok": 4 })), &["a token's 4 experts"]);
}

#[test]
fn unsupported_settings_of_gpt_oss_are_refused() {
    let of = |more| config("gpt_oss", more);
    assert!(Decoder::new(of(json!({}))).is_ok());
    refused(of(json!({ "quantization_config": { "quant_method": "fp8" } })), &["\"fp8\"", "mxfp4"]);
    refused(of(json!({ "swiglu_limit": 0.0 })), &["swiglu_limit is 0"]);
    refused(of(json!({ "num_experts_per_tok": 0 })), &["num_experts_per_tok is 0", "128"]);
    refused(of(json!({ "sliding_window": null })), &["layer 0", "sliding_window"]);
    let masks = Decoder::new(of(json!({ "sliding_window": 5 }))).expect("supported");
    let plain = (0..3).map(|layer| *masks.mask(layer) == Mask::causal());
    assert_eq!(plain.collect::<Vec<_>>(), [false, true, false]);
}
