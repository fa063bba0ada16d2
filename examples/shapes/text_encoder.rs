//! A text encoder of UMT5's form with random weights, which nothing trains, and a tokenizer of a dozen words: prompts become
//! different embeddings, which is all that the transformer needs to tell them apart.

use candle_core::{Device, Tensor};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::error::Error;
use std::path::Path;

/// Width of the embeddings.
pub(crate) const WIDTH: usize = 32;
const HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const INNER: usize = 64;
const LAYERS: usize = 2;
const BUCKETS: usize = 32;

/// Writes the folders `tokenizer` and `text_encoder` of a pipeline.
pub(crate) fn write(pipeline: &Path, words: &[&str], seed: u64) -> Result<(), Box<dyn Error>> {
    let (tokenizer, encoder) = (pipeline.join("tokenizer"), pipeline.join("text_encoder"));
    std::fs::create_dir_all(&tokenizer)?;
    std::fs::create_dir_all(&encoder)?;
    let special = ["<pad>", "</s>", "<unk>"];
    let vocabulary: Map<String, Value> =
        special.iter().chain(words).enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
    let size = vocabulary.len();
    let end = json!({ "SpecialToken": { "id": "</s>", "type_id": 0 } });
    let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": { "type": "Lowercase" },
        "pre_tokenizer": { "type": "Whitespace" },
        "added_tokens": [],
        "post_processor": {
            "type": "TemplateProcessing", "single": [text, end], "pair": [text, end],
            "special_tokens": { "</s>": { "id": "</s>", "ids": [1], "tokens": ["</s>"] } },
        },
        "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>" },
    });
    std::fs::write(tokenizer.join("tokenizer.json"), serde_json::to_string_pretty(&json)?)?;
    let config = json!({
        "architectures": ["UMT5EncoderModel"], "model_type": "umt5", "d_model": WIDTH, "d_kv": HEAD_DIM, "d_ff": INNER,
        "num_heads": HEADS, "num_layers": LAYERS, "vocab_size": size, "relative_attention_num_buckets": BUCKETS,
        "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6, "feed_forward_proj": "gated-gelu",
    });
    std::fs::write(encoder.join("config.json"), serde_json::to_string_pretty(&config)?)?;

    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut tensors = HashMap::new();
    let mut add = |name: String, shape: &[usize], scale: f64| -> candle_core::Result<()> {
        // Sums of uniform numbers are nearly normal.
        let mut normal = || (0..12).map(|_| f64::from(random.next_u32()) / f64::from(u32::MAX)).sum::<f64>() - 6.0;
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| (scale * normal()) as f32).collect();
        tensors.insert(name, Tensor::from_vec(values, shape, &Device::Cpu)?);
        Ok(())
    };
    let of_width = 1.0 / (WIDTH as f64).sqrt();
    add("shared.weight".into(), &[size, WIDTH], 1.0)?;
    for layer in 0..LAYERS {
        let name = |part: &str| format!("encoder.block.{layer}.layer.{part}.weight");
        for part in ["q", "k", "v"] {
            add(name(&format!("0.SelfAttention.{part}")), &[HEADS * HEAD_DIM, WIDTH], of_width)?;
        }
        add(name("0.SelfAttention.o"), &[WIDTH, HEADS * HEAD_DIM], 0.5 * of_width)?;
        add(name("0.SelfAttention.relative_attention_bias"), &[BUCKETS, HEADS], 0.5)?;
        add(name("1.DenseReluDense.wi_0"), &[INNER, WIDTH], of_width)?;
        add(name("1.DenseReluDense.wi_1"), &[INNER, WIDTH], of_width)?;
        add(name("1.DenseReluDense.wo"), &[WIDTH, INNER], 0.5 * of_width)?;
    }
    let norms = (0..LAYERS)
        .flat_map(|layer| [0, 1].map(|part| format!("encoder.block.{layer}.layer.{part}.layer_norm.weight")));
    for name in norms.chain(["encoder.final_layer_norm.weight".into()]) {
        tensors.insert(name, Tensor::ones(WIDTH, candle_core::DType::F32, &Device::Cpu)?);
    }
    candle_core::safetensors::save(&tensors, encoder.join("model.safetensors"))?;
    Ok(())
}
