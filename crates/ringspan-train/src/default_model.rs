//! The model a run starts with when none is given: small enough for minutes on two cores, and a Llama like any other.

use serde_json::{Value, json};

/// `config.json` of a new byte-level Llama for sequences of `length` tokens.
#[must_use]
pub fn config(length: usize) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": false,
        "mlp_bias": false,
        "tie_word_embeddings": true,
        "eos_token_id": 256,
        "torch_dtype": "float32",
    })
}
