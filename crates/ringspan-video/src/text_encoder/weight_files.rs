//! The files of a text encoder's weights: safetensors as transformers saves them, or one GGUF file as llama.cpp converts them.

use crate::error::Result;
use crate::gguf_folder::gguf_of;
use crate::tensor_folder::TensorFolder;
use candle_core::Tensor;
use ringspan_candle::Weight;
use ringspan_models::gguf::GgufTensors;
use std::path::{Path, PathBuf};

/// A text encoder's weights on disk, by the names of transformers.
#[derive(Debug)]
pub(super) enum WeightFiles {
    Safetensors(TensorFolder),
    Gguf(PathBuf, GgufTensors),
}

const WEIGHTS: &str = "model";
const ARCHITECTURE: &str = "t5encoder";

/// Parts of a layer: the name of transformers and that of llama.cpp.
const OF_LAYERS: [(&str, &str); 10] = [
    ("layer.0.layer_norm", "attn_norm"),
    ("layer.0.SelfAttention.q", "attn_q"),
    ("layer.0.SelfAttention.k", "attn_k"),
    ("layer.0.SelfAttention.v", "attn_v"),
    ("layer.0.SelfAttention.o", "attn_o"),
    ("layer.0.SelfAttention.relative_attention_bias", "attn_rel_b"),
    ("layer.1.layer_norm", "ffn_norm"),
    ("layer.1.DenseReluDense.wi_0", "ffn_gate"),
    ("layer.1.DenseReluDense.wi_1", "ffn_up"),
    ("layer.1.DenseReluDense.wo", "ffn_down"),
];

impl WeightFiles {
    pub(super) fn open(folder: &Path) -> Result<Self> {
        match gguf_of(folder, WEIGHTS)? {
            Some(file) => Ok(Self::Gguf(file.clone(), GgufTensors::open(&file, ARCHITECTURE)?)),
            None => Ok(Self::Safetensors(TensorFolder::open(folder, WEIGHTS)?)),
        }
    }

    /// The file or folder, for errors.
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Safetensors(tensors) => tensors.path(),
            Self::Gguf(path, _) => path,
        }
    }

    /// The shape of a tensor, if there is one.
    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        match self {
            Self::Safetensors(tensors) => tensors.shape(name).ok(),
            Self::Gguf(_, tensors) => tensors.shape(&stored_name(name)),
        }
    }

    /// Bytes that a tensor takes in memory as [`read_stored`](Self::read_stored) returns it.
    pub(super) fn stored_bytes(&self, name: &str) -> Result<u64> {
        match self {
            Self::Safetensors(tensors) => tensors.stored_bytes(name),
            Self::Gguf(_, tensors) => Ok(tensors.stored_bytes(&stored_name(name))?),
        }
    }

    /// Reads a tensor as f32.
    pub(super) fn read(&self, name: &str) -> Result<Tensor> {
        match self {
            Self::Safetensors(tensors) => tensors.read(name),
            Self::Gguf(_, tensors) => Ok(tensors.read(&stored_name(name))?),
        }
    }

    /// Reads a matrix as layers compute with it.
    pub(super) fn read_stored(&self, name: &str) -> Result<Weight> {
        match self {
            Self::Safetensors(tensors) => tensors.read_stored(name),
            Self::Gguf(_, tensors) => Ok(tensors.read_stored(&stored_name(name))?),
        }
    }

    /// Reads some rows of a matrix as f32.
    pub(super) fn read_rows(&self, name: &str, rows: &[u32]) -> Result<Tensor> {
        match self {
            Self::Safetensors(tensors) => tensors.read_rows(name, rows),
            Self::Gguf(_, tensors) => Ok(tensors.read_rows(&stored_name(name), rows)?),
        }
    }
}

/// The name in llama.cpp of a parameter.
fn stored_name(name: &str) -> String {
    let of_layer = || {
        let (layer, part) = name.strip_prefix("encoder.block.")?.split_once('.')?;
        let part = part.strip_suffix(".weight")?;
        let (_, stored) = OF_LAYERS.into_iter().find(|(of_transformers, _)| *of_transformers == part)?;
        Some(format!("enc.blk.{layer}.{stored}.weight"))
    };
    match name {
        "shared.weight" => "token_embd.weight".into(),
        "encoder.final_layer_norm.weight" => "enc.output_norm.weight".into(),
        _ => of_layer().unwrap_or_else(|| name.to_owned()),
    }
}
