//! Models in one GGUF file, as llama.cpp keeps them: read to f32, whatever they are quantised to.
//!
//! The file's metadata becomes a `config.json`, so a model that was read here can be saved as a folder.

mod tokenizer;

pub use tokenizer::tokenizer;

use crate::config::Config;
use crate::decoder::{Decoder, EMBEDDING, HEAD, NORM};
use crate::error::{Error, Result};
use crate::folder::check_shapes;
use crate::rope::{self, Parameters};
use candle_core::quantized::gguf_file::{Content, Value as Entry};
use candle_core::{Device, Tensor};
use ringspan_candle::Weights;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// Models whose tensors are known by GGUF's names.
const MODELS: &str = "llama, qwen2, qwen3";
/// Factors on the rotary embedding's waves, where they are more than one number.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Reads a model: its configuration, and its weights as f32.
///
/// # Errors
/// A file that is missing, corrupt or of another model, and tensors that do not fit it.
pub fn load(path: &Path) -> Result<(Config, Weights)> {
    let (mut file, content) = open(path)?;
    let config = config(path, &mut file, &content)?;
    let decoder = Decoder::new(config.clone()).map_err(|error| broken(path, &error))?;
    let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads());
    let mut weights = Weights::new();
    // A map's order is no order; errors name the first tensor.
    let names: BTreeSet<&String> = content.tensor_infos.keys().filter(|name| *name != ROPE_FACTORS).collect();
    for stored in names {
        let name = parameter(stored).ok_or_else(|| broken(path, &format!("tensor {stored} is unknown")))?;
        let mut tensor = read(path, &mut file, &content, stored)?;
        if config.model_type == "llama" && (name.contains(".q_proj.") || name.contains(".k_proj.")) {
            let heads = if name.contains(".q_proj.") { heads } else { kv_heads };
            tensor = halves_together(&tensor, heads).map_err(|error| broken(path, &format!("{stored}: {error}")))?;
        }
        weights.insert(name, tensor);
    }
    check_shapes(&decoder.shapes(), weights.iter().map(|(name, tensor)| (name, tensor.dims())))?;
    Ok((config, weights))
}

/// What `config.json` would say of the model.
///
/// # Errors
/// A file that is missing or corrupt, and metadata that is missing or speaks of another model.
pub fn config_json(path: &Path) -> Result<Value> {
    let (mut file, content) = open(path)?;
    json(path, &mut file, &content)
}

fn broken(path: &Path, problem: &impl ToString) -> Error {
    Error::Format { path: path.to_owned(), problem: problem.to_string() }
}

fn open(path: &Path) -> Result<(BufReader<File>, Content)> {
    let file = File::open(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
    let mut file = BufReader::new(file);
    let content = Content::read(&mut file).map_err(|error| broken(path, &format!("not a whole GGUF file: {error}")))?;
    Ok((file, content))
}

fn read(path: &Path, file: &mut BufReader<File>, content: &Content, name: &str) -> Result<Tensor> {
    let tensor = content.tensor(file, name, &Device::Cpu).and_then(|tensor| tensor.dequantize(&Device::Cpu));
    tensor.map_err(|error| broken(path, &format!("tensor {name}: {error}")))
}

fn config(path: &Path, file: &mut BufReader<File>, content: &Content) -> Result<Config> {
    serde_json::from_value(json(path, file, content)?).map_err(|error| broken(path, &error))
}

fn json(path: &Path, file: &mut BufReader<File>, content: &Content) -> Result<Value> {
    let text = |key: &str| content.metadata.get(key).and_then(|entry| entry.to_string().ok()).map(String::as_str);
    let model = text("general.architecture").unwrap_or_default();
    if !MODELS.split(", ").any(|known| known == model) {
        return Err(broken(path, &format!("general.architecture '{model}' is unknown: possible are {MODELS}")));
    }
    let own = |key: &str| content.metadata.get(&format!("{model}.{key}"));
    let number = |key: &str| own(key).and_then(number);
    let need = |key: &str| {
        let whole = number(key).filter(|x| *x >= 0.0 && x.fract() == 0.0).map(|x| x as u64);
        whole.ok_or_else(|| broken(path, &format!("{model}.{key} is missing or no count")))
    };
    let Some(embedding) = content.tensor_infos.get("token_embd.weight") else {
        return Err(broken(path, &"tensor token_embd.weight is missing"));
    };
    let (hidden, heads) = (need("embedding_length")?, need("attention.head_count")?);
    let dim = number("attention.key_length").or_else(|| number("rope.dimension_count")).map(|dim| dim as u64);
    let dim = dim.unwrap_or(hidden / heads.max(1));
    let has = |name: &str| content.tensor_infos.contains_key(name);
    let mut config = json!({
        "architectures": [match model { "llama" => "LlamaForCausalLM", "qwen2" => "Qwen2ForCausalLM", _ => "Qwen3ForCausalLM" }],
        "model_type": model,
        "vocab_size": embedding.shape.dims().first().copied().unwrap_or(0),
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length")?,
        "num_hidden_layers": need("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv").map_or(heads, |heads| heads as u64),
        "head_dim": dim,
        "hidden_act": "silu",
        "max_position_embeddings": need("context_length")?,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon").unwrap_or(1e-6),
        "rope_theta": number("rope.freq_base").unwrap_or(10_000.0),
        "tie_word_embeddings": !has("output.weight"),
        "attention_bias": model == "llama" && has("blk.0.attn_q.bias"),
        "torch_dtype": "float32",
    });
    for (key, name) in
        [("bos_token_id", "tokenizer.ggml.bos_token_id"), ("eos_token_id", "tokenizer.ggml.eos_token_id")]
    {
        if let Some(token) = content.metadata.get(name).and_then(self::number) {
            config[key] = json!(token as u64);
        }
    }
    let kind = own("rope.scaling.type").and_then(|kind| kind.to_string().ok()).map(String::as_str);
    let scaling = match kind {
        None | Some("none") => None,
        Some(kind @ ("linear" | "yarn")) => {
            let mut scaling = json!({ "rope_type": kind, "factor": number("rope.scaling.factor") });
            if let (Some(length), "yarn") = (number("rope.scaling.original_context_length"), kind) {
                scaling["original_max_position_embeddings"] = json!(length as u64);
            }
            Some(scaling)
        }
        Some(other) => {
            let problem = format!("{model}.rope.scaling.type '{other}' is unknown: possible are none, linear, yarn");
            return Err(broken(path, &problem));
        }
    };
    if has(ROPE_FACTORS) {
        let factors = read(path, file, content, ROPE_FACTORS)?.flatten_all()?.to_vec1::<f32>()?;
        config["rope_scaling"] = llama3(&config, &factors).map_err(|problem| broken(path, &problem))?;
    } else if let Some(scaling) = scaling {
        config["rope_scaling"] = scaling;
    }
    Ok(config)
}

fn number(entry: &Entry) -> Option<f64> {
    match entry {
        Entry::F32(x) => Some(f64::from(*x)),
        Entry::F64(x) => Some(*x),
        Entry::I8(x) => Some(f64::from(*x)),
        Entry::I16(x) => Some(f64::from(*x)),
        Entry::I32(x) => Some(f64::from(*x)),
        Entry::I64(x) => Some(*x as f64),
        other => other.to_u64().ok().map(|x| x as f64),
    }
}

/// Llama 3.1's stretching, from what it came to: files keep the quotients of waves, not the numbers behind them. All
/// published models differ in the factor only, so that is read off, and the rest is checked.
fn llama3(config: &Value, factors: &[f32]) -> std::result::Result<Value, String> {
    let factor = factors.iter().copied().fold(1.0, f32::max);
    let parameters = json!({
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192
    });
    let frequencies = |parameters: Option<Value>| -> Result<Vec<f64>> {
        let config: Config =
            serde_json::from_value(config.clone()).map_err(|error| Error::Config(error.to_string()))?;
        config.check()?;
        let parse =
            |value| serde_json::from_value::<Parameters>(value).map_err(|error| Error::Config(error.to_string()));
        Ok(rope::new(&config, parameters.map(parse).transpose()?.as_ref(), 10_000.0)?.frequencies)
    };
    let both = frequencies(None).and_then(|plain| Ok((plain, frequencies(Some(parameters.clone()))?)));
    let (plain, stretched) = both.map_err(|error| error.to_string())?;
    let same = |((plain, stretched), factor): ((&f64, &f64), &f32)| {
        (plain / stretched / f64::from(*factor) - 1.0).abs() < 1e-3
    };
    if plain.len() == factors.len() && plain.iter().zip(&stretched).zip(factors).all(same) {
        return Ok(parameters);
    }
    Err(format!(
        "the {} factors of {ROPE_FACTORS} are not those of Llama 3.1 for heads of {}: possible are low_freq_factor 1, \
         high_freq_factor 4 and 8192 original positions",
        factors.len(),
        2 * plain.len()
    ))
}

/// Hugging Face's name of a tensor.
fn parameter(stored: &str) -> Option<String> {
    match stored {
        "token_embd.weight" => return Some(EMBEDDING.into()),
        "output_norm.weight" => return Some(NORM.into()),
        "output.weight" => return Some(HEAD.into()),
        _ => {}
    }
    let (layer, rest) = stored.strip_prefix("blk.")?.split_once('.')?;
    let (part, kind) = rest.rsplit_once('.').filter(|(_, kind)| ["weight", "bias"].contains(kind))?;
    let part = match part {
        "attn_norm" => "input_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return None,
    };
    let layer: usize = layer.parse().ok()?;
    Some(format!("model.layers.{layer}.{part}.{kind}"))
}

/// Llama's queries and keys are stored with the two elements of a pair beside each other; here, as at Hugging Face,
/// they are half a head apart. Rows `[H * D, ..]`.
fn halves_together(x: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
    let rows = x.dim(0)?;
    let width = x.elem_count() / rows.max(1);
    let dim = rows / heads;
    x.reshape((heads, dim / 2, 2, width))?.transpose(1, 2)?.contiguous()?.reshape(x.shape())
}
