//! Models in one GGUF file, the format of llama.cpp: matrices stay as they are stored, or are decoded to f32.
//!
//! The file's metadata is translated to a `config.json`, so a model read here can be saved as a Hugging Face folder.

mod family;
mod file;
mod joined;
mod metadata;
mod rope;
mod tokenizer;

pub(crate) use tokenizer::has_tokenizer;
pub use tokenizer::{ChatTemplate, chat_template, tokenizer};

use crate::config::Config;
use crate::decoder::Decoder;
use crate::error::Result;
use crate::folder::check_shapes;
use candle_core::Tensor;
use family::{GgufFamily, Pairs, StoredTensor};
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
    let file = GgufFile::open(path)?;
    let metadata = Metadata::new(&file);
    let family = GgufFamily::of(&metadata)?;
    let config: Config = serde_json::from_value(json(&metadata, family)?).map_err(|error| file.broken(&error))?;
    let decoder = Decoder::new(config.clone()).map_err(|error| file.broken(&error))?;
    let (as_stored, mut weights) = (decoder.stored_matrices(), StoredWeights::new());
    for stored in file.names().filter(|name| !rope::is_factors(name)) {
        let refused = |error: candle_core::Error| file.broken(&format!("{stored}: {error}"));
        let tensor = family.tensor(stored, |name| file.shape(name).is_some());
        let name = match tensor.ok_or_else(|| file.broken(&format!("tensor {stored} is unknown")))? {
            StoredTensor::Spare => continue,
            StoredTensor::Second { first } if file.shape(&first).is_some() => continue,
            StoredTensor::Second { first } => {
                return Err(file.broken(&format!("tensor {first} is missing, and {stored} is there")));
            }
            StoredTensor::First { parameter, second, joined } => {
                let both = [read(&file, stored)?, read(&file, &second)?];
                weights.insert(parameter, joined.parameter(both).map_err(refused)?);
                continue;
            }
            StoredTensor::Parameter(name) => name,
        };
        let (weight, shape) = read(&file, stored)?;
        match name.split_once("{}") {
            Some((before, behind)) => {
                let [experts, rows, _] = shape[..] else {
                    return Err(file.broken(&format!("{stored}: experts are [experts, rows, columns]")));
                };
                for expert in 0..experts {
                    let own = rows_of(&weight, expert * rows..(expert + 1) * rows).map_err(refused)?;
                    weights.insert(format!("{before}{expert}{behind}"), own);
                }
            }
            None => {
                let weight = converted(family, &config, &name, weight).map_err(refused)?;
                let weight = match (as_stored.contains(&name), shape.len()) {
                    (true, 3) => joined::experts(weight, &shape).map_err(refused)?,
                    (true, _) => weight,
                    (false, _) => shaped(&weight, &shape).map_err(refused)?,
                };
                weights.insert(name, weight);
            }
        }
    }
    let shapes: Vec<(&String, Vec<usize>)> = weights.iter().map(|(name, weight)| (name, weight.dims())).collect();
    check_shapes(&decoder.shapes(), shapes.iter().map(|(name, shape)| (*name, shape.as_slice())))?;
    Ok((config, weights))
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

/// A tensor as rows of its last dimension, and its shape.
fn read(file: &GgufFile, name: &str) -> Result<(Weight, Vec<usize>)> {
    Ok((file.matrix(name)?, file.shape(name).unwrap_or_default().to_vec()))
}

/// A tensor as the Hugging Face model has it: the changes of llama.cpp's converter are undone.
fn converted(family: &GgufFamily, config: &Config, name: &str, weight: Weight) -> candle_core::Result<Weight> {
    if family.norms_plus_one && name.ends_with("norm.weight") {
        return Ok((weight.to_tensor()? - 1.0)?.into());
    }
    let heads = match () {
        () if family.pairs == Pairs::Unchanged => return Ok(weight),
        () if name.contains(".q_proj.") => config.num_attention_heads,
        () if name.contains(".k_proj.") => config.num_key_value_heads(),
        () => return Ok(weight),
    };
    // The matrix of a bias has one row, with a number for each output.
    let rows = if name.ends_with("bias") { weight.dims()[1] } else { weight.dims()[0] };
    let dim = rows / heads.max(1);
    if dim * heads != rows || !dim.is_multiple_of(2) {
        candle_core::bail!("{rows} rows are not {heads} heads of pairs");
    }
    let order: Vec<usize> = (0..rows).map(|row| neighbour(row, dim)).collect();
    match weight {
        Weight::Quantized(matrix) => Ok(matrix.select_rows(&order)?.into()),
        Weight::Stack(_) => Ok(weight),
        Weight::Dense(tensor) => {
            let order = Tensor::from_vec(order.iter().map(|row| *row as u32).collect(), rows, tensor.device())?;
            Ok(tensor.index_select(&order, usize::from(name.ends_with("bias")))?.into())
        }
    }
}

/// The file's row that becomes row `row` of the Hugging Face model. A rotary pair is neighbouring rows in the file, and rows half
/// a head of width `dim` apart in the Hugging Face model.
fn neighbour(row: usize, dim: usize) -> usize {
    let (head, at) = (row / dim * dim, row % dim);
    head + 2 * (at % (dim / 2)) + at / (dim / 2)
}

/// Some rows of a matrix, in the type in which it is stored.
fn rows_of(weight: &Weight, rows: std::ops::Range<usize>) -> candle_core::Result<Weight> {
    match weight {
        Weight::Dense(tensor) => Ok(tensor.narrow(0, rows.start, rows.len())?.contiguous()?.into()),
        Weight::Quantized(matrix) => Ok(matrix.rows(rows)?.into()),
        Weight::Stack(stack) => candle_core::bail!("rows {rows:?} of {stack:?}"),
    }
}

/// A tensor in f32, reshaped to its stored shape.
fn shaped(weight: &Weight, shape: &[usize]) -> candle_core::Result<Weight> {
    weight.to_tensor()?.reshape(shape).map(Weight::Dense)
}
