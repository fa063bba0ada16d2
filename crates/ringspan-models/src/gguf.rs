//! Models in one GGUF file, the format of llama.cpp: matrices stay as they are stored, or are decoded to f32.
//!
//! The file's metadata is translated to a `config.json`, so a model read here can be saved as a Hugging Face folder.

mod family;
mod file;
mod joined;
mod metadata;
mod model;
mod rope;
mod tensors;
mod tokenizer;

pub use model::GgufModel;
pub use tensors::GgufTensors;
pub(crate) use tokenizer::has_tokenizer;
pub use tokenizer::{ChatTemplate, chat_template, tokenizer};

use crate::config::Config;
use crate::error::Result;
use family::GgufFamily;
use file::GgufFile;
use metadata::Metadata;
use ringspan_candle::{StoredWeights, Weight, Weights};
use serde_json::{Value, json};
use std::path::Path;

/// Reads a model: its configuration, and its weights as f32.
///
/// # Errors
/// A file that is missing, corrupt or of an unknown model, and tensors that do not fit the model.
pub fn load(path: &Path) -> Result<(Config, Weights)> {
    let (config, weights) = load_stored(path)?;
    // Each matrix is freed once it is decoded, so that no second copy of the whole model is in memory.
    let decoded = |(name, weight): (String, Weight)| Ok((name, weight.to_tensor()?));
    Ok((config, weights.into_iter().map(decoded).collect::<Result<_>>()?))
}

/// Reads a model: its configuration, and its weights as the file stores them. Norms and biases, and types of quantization for
/// which there is no [`Format`](ringspan_candle::quantized::Format), are decoded to f32.
///
/// # Errors
/// As for [`load`].
pub fn load_stored(path: &Path) -> Result<(Config, StoredWeights)> {
    let model = GgufModel::open(path)?;
    let weights = model.names().map(|name| Ok((name.clone(), model.read(name)?))).collect::<Result<_>>()?;
    Ok((model.config().clone(), weights))
}

/// The `config.json` that the metadata of the file amounts to.
///
/// # Errors
/// A file that is missing or corrupt, and metadata that is missing or describes an unknown model.
pub fn config_json(path: &Path) -> Result<Value> {
    let file = GgufFile::open(path)?;
    let metadata = Metadata::new(&file);
    json(&metadata, GgufFamily::of(&metadata)?)
}

fn json(metadata: &Metadata, family: &GgufFamily) -> Result<Value> {
    let Some(embedding) = metadata.file().shape("token_embd.weight") else {
        return Err(metadata.file().broken(&"tensor token_embd.weight is missing"));
    };
    let (hidden, heads) = (metadata.need("embedding_length")?, metadata.need("attention.head_count")?);
    let turned = metadata.count("rope.dimension_count")?;
    let of_head = metadata.count("attention.key_length")?.or(turned.filter(|_| !family.partial_rotary));
    let dim = of_head.unwrap_or(hidden / heads.max(1));
    let mut config = json!({
        "architectures": [family.class],
        "model_type": family.model_type,
        "vocab_size": embedding.first().copied().unwrap_or(0),
        "hidden_size": hidden,
        "intermediate_size": metadata.need("feed_forward_length")?,
        "num_hidden_layers": metadata.need("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv")?.unwrap_or(heads),
        "head_dim": dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.need("context_length")?,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon").unwrap_or(1e-6),
        "rope_theta": metadata.number("rope.freq_base").unwrap_or(10_000.0),
        "sliding_window": metadata.count("attention.sliding_window")?.filter(|window| *window > 0),
        "tie_word_embeddings": !metadata.has("output.weight"),
        "attention_bias": false,
        "torch_dtype": "float32",
    });
    if let Some(turned) = turned.filter(|turned| *turned != dim) {
        // Models that rotate whole heads refuse this key.
        config["partial_rotary_factor"] = json!(turned as f64 / dim.max(1) as f64);
    }
    let token = |name: &str| metadata.of_file(&format!("tokenizer.ggml.{name}_token_id")).map(|token| token as u64);
    if let Some(token) = token("bos") {
        config["bos_token_id"] = json!(token);
    }
    // A token that ends a turn ends generation, too.
    let mut ends: Vec<u64> = ["eos", "eot", "eom"].into_iter().filter_map(token).collect();
    ends.dedup();
    match ends[..] {
        [] => {}
        [end] => config["eos_token_id"] = json!(end),
        _ => config["eos_token_id"] = json!(ends),
    }
    (family.config)(metadata, &mut config)?;
    if let Some(scaling) = rope::scaling(metadata, &config)? {
        config["rope_scaling"] = scaling;
    }
    Ok(config)
}
