//! The model a run starts with when none is given: small enough for minutes on two cores, and a Qwen3 like any other.

use crate::error::{Result, model_error};
use candle_core::Tensor;
use ringspan_candle::Weights;
use ringspan_models::Decoder;
use serde_json::{Value, json};

/// Standard deviation of the default model's new embedding.
const EMBEDDING_STD: f64 = 0.5;

/// `config.json` of a new byte-level Qwen3 for sequences of `length` tokens.
///
/// Its first layer sees 16 bytes, its second the whole document: a layer that must find its neighbours among thousands of
/// tokens learns little in the first hundred steps.
pub(crate) fn config(length: usize) -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 257,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": false,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": true,
        "sliding_window": 16,
        "max_window_layers": 0,
        "tie_word_embeddings": false,
        "eos_token_id": 256,
        "torch_dtype": "float32",
    })
}

/// New weights for [`config`]: the decoder's, with embedding and layers brought to a scale that suits this width.
///
/// The usual standard deviation of 0.02 is made for widths of thousands. At 128 it leaves the layers' matrices at a quarter of
/// their natural size, 1 / sqrt(inputs), and the embedding so small that the first hundred steps go into growing it. The head
/// keeps the small deviation: a new model then gives all tokens nearly the same probability, and the first loss is ln 257.
///
/// # Errors
/// Errors of the decoder's own initialisation.
pub(crate) fn weights(decoder: &Decoder, seed: u64) -> Result<Weights> {
    let mut weights = decoder.init(seed).map_err(model_error)?;
    for (name, tensor) in &mut weights {
        let std = match *tensor.dims() {
            [_, _] if name == decoder.embedding_name() => EMBEDDING_STD,
            [_, inputs] if name != decoder.head_name() => 1.0 / (inputs as f64).sqrt(),
            _ => continue,
        };
        *tensor = scale_to_std(tensor, std)?;
    }
    Ok(weights)
}

fn scale_to_std(tensor: &Tensor, std: f64) -> Result<Tensor> {
    let mean_square: f32 = tensor.sqr()?.mean_all()?.to_scalar()?;
    let factor = std / f64::from(mean_square).sqrt().max(f64::MIN_POSITIVE);
    Ok((tensor * factor)?)
}
