//! Writes models to GGUF files.

use candle_core::Tensor;
use candle_core::quantized::gguf_file::{self, Value as Entry};
use candle_core::quantized::{GgmlDType, QTensor};
use serde_json::Value;
use std::fs::File;
use std::path::Path;

/// Writes a Llama to a GGUF file: `json` is its Hugging Face configuration, `parameters` have their Hugging Face names, and matrices
/// are quantized to Q4_0.
///
/// # Panics
/// A configuration without a size, and a file that cannot be written.
pub fn write_llama_q4_0(path: &Path, json: &Value, parameters: impl Iterator<Item = (String, Tensor)>) {
    let sizes = [
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.key_length", "head_dim"),
    ];
    let entry =
        |key: &str, from: &str| (format!("llama.{key}"), Entry::U32(json[from].as_u64().expect("a size") as u32));
    let mut metadata: Vec<(String, Entry)> = sizes.into_iter().map(|(key, from)| entry(key, from)).collect();
    metadata.push(("general.architecture".into(), Entry::String("llama".into())));
    metadata.push(("llama.attention.layer_norm_rms_epsilon".into(), Entry::F32(1e-5)));
    let quantized = |(name, tensor): (String, Tensor)| {
        let kind = if tensor.rank() == 1 { GgmlDType::F32 } else { GgmlDType::Q4_0 };
        (stored_name(&name), QTensor::quantize(&tensor, kind).expect("whole blocks"))
    };
    let tensors: Vec<(String, QTensor)> = parameters.map(quantized).collect();
    let metadata: Vec<(&str, &Entry)> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut file = File::create(path).expect("a new file");
    gguf_file::write(&mut file, &metadata, &tensors).expect("room for the file");
}

/// The name in GGUF files of a parameter of Llama, from its Hugging Face name.
#[must_use]
pub fn stored_name(name: &str) -> String {
    [
        ("model.layers.", "blk."),
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ]
    .into_iter()
    .fold(name.to_owned(), |name, (ours, theirs)| name.replace(ours, theirs))
}
