//! A model small enough to train in minutes on two cores, and able to find a key.

use anyhow::Result;
use ringspan_candle::Weights;
use ringspan_models::{Config, Decoder, folder};
use ringspan_train::Tokenizer;
use serde_json::{Value, json};
use std::path::Path;

/// A byte-level Gemma 3 of two layers. The first sees 8 bytes: it learns which digit of the key a byte is. The second sees
/// the whole text, and looks for the digit that comes next.
///
/// Gemma gives local and global layers rotary bases of their own. The local one is small, so that neighbours differ; the
/// global one is large, so that a needle looks alike from anywhere in `positions` tokens.
fn config(positions: usize) -> Value {
    json!({
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e12,
        "rope_local_base_freq": 100.0,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "attention_bias": false,
        "tie_word_embeddings": true,
        "eos_token_id": 256,
        "torch_dtype": "float32",
    })
}

/// Standard deviation of a new embedding, which Gemma multiplies by the root of the width.
const EMBEDDING: f64 = 0.06;

/// Writes a new model into a folder in the layout of Hugging Face.
pub(crate) fn write(path: &Path, positions: usize, seed: u64) -> Result<()> {
    let json = config(positions);
    let decoder = Decoder::new(serde_json::from_value::<Config>(json.clone())?)?;
    folder::save(path, &json, &weights(&decoder, seed)?)?;
    let tokenizer = Tokenizer::byte_level(path)?;
    Ok(std::fs::write(path.join("tokenizer.json"), tokenizer.to_json()?)?)
}

/// New weights. The usual deviation of 0.02 is meant for widths of thousands; at 64 the embedding outweighs the layers, and
/// hundreds of steps are spent on growing them. So matrices have a deviation of 1 / sqrt(inputs).
fn weights(decoder: &Decoder, seed: u64) -> Result<Weights> {
    const USUAL: f64 = 0.02;
    let mut weights = decoder.init(seed)?;
    for (name, tensor) in &mut weights {
        let wanted = match *tensor.dims() {
            [_, _] if name == decoder.embedding_name() => EMBEDDING,
            [_, inputs] => 1.0 / (inputs as f64).sqrt(),
            _ => continue,
        };
        *tensor = (&*tensor * (wanted / USUAL))?;
    }
    Ok(weights)
}
