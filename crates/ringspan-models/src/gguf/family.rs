//! The model families that can be read from GGUF files: the names of their tensors, the changes that llama.cpp's converter
//! makes to these, and the keys of `config.json` that correspond to their metadata.

mod deepseek;
mod gemma;
mod glm4;
mod gpt_oss;
mod llama;
mod olmo2;
mod phi3;
mod qwen;

use super::joined::Joined;
use super::metadata::Metadata;
use crate::decoder::{EMBEDDING, HEAD, NORM};
use crate::error::Result;
use serde_json::Value;

/// How a model family is stored in GGUF files.
pub(super) struct GgufFamily {
    /// The value of `general.architecture`.
    pub(super) architecture: &'static str,
    /// Whether its feed-forward layers are mixtures of experts.
    pub(super) sparse: bool,
    /// The value of `model_type` in `config.json`.
    pub(super) model_type: &'static str,
    /// Its class name in `architectures` of `config.json`.
    pub(super) class: &'static str,
    /// Adds the keys of `config.json` that only this family has.
    pub(super) config: fn(&Metadata, &mut Value) -> Result<()>,
    /// Modules of a layer whose names differ from [`COMMON`], as (GGUF name, Hugging Face name); `{}` stands for an expert's
    /// number.
    pub(super) modules: &'static [(&'static str, &'static str)],
    /// Tensors of a layer whose Hugging Face names do not end in `.weight` or `.bias`, as (GGUF name, Hugging Face name).
    pub(super) full_names: &'static [(&'static str, &'static str)],
    /// Parameters of a layer that files store in two tensors.
    pub(super) split: &'static [TwoTensors],
    /// Which two elements of a head the rotary embedding rotates together.
    pub(super) pairs: RotaryPairs,
    /// Whether the norms' weights in the file have 1 added.
    pub(super) norms_plus_one: bool,
    /// Whether the rotary embedding may cover only a part of each head, so that its width says nothing of the head's.
    pub(super) partial_rotary: bool,
}

/// Which rows of the query and key matrices form a pair that is rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RotaryPairs {
    /// The same rows as in the Hugging Face model.
    Unchanged,
    /// Neighbouring rows, where the Hugging Face model has rows that are half a head apart.
    Neighbours,
}

/// A parameter of a layer that files store in two tensors.
pub(super) struct TwoTensors {
    /// The names of the two tensors in the layer.
    pub(super) stored: [&'static str; 2],
    /// The parameter's name at Hugging Face.
    pub(super) parameter: &'static str,
    pub(super) joined: Joined,
    /// A tensor that some files have in addition and that holds the whole parameter; then the two tensors are ignored.
    pub(super) unless: Option<&'static str>,
}

/// The role of a tensor in a file.
pub(super) enum StoredTensor {
    /// A parameter, by its name at Hugging Face; for a tensor of all experts, `{}` stands for the expert's number.
    Parameter(String),
    /// The first of the two tensors of a parameter.
    First { parameter: String, second: String, joined: Joined },
    /// The second of the two tensors, which is read with the first.
    Second { first: String },
    /// A part of a parameter that the file also has as a whole; it is not read.
    Spare,
}

/// All families that can be read.
const FAMILIES: [GgufFamily; 14] = [
    llama::LLAMA,
    llama::MIXTRAL,
    qwen::QWEN2,
    qwen::QWEN3,
    qwen::QWEN3_MOE,
    gemma::GEMMA2,
    gemma::GEMMA3,
    olmo2::OLMO2,
    glm4::GLM4,
    phi3::PHI3,
    llama::SMOLLM3,
    llama::GRANITE,
    deepseek::DEEPSEEK2,
    gpt_oss::GPT_OSS,
];

/// Modules of a layer that most families have, as (GGUF name, Hugging Face name).
const COMMON: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

impl GgufFamily {
    /// Finds the family of a file.
    ///
    /// # Errors
    /// An architecture that is unknown, and a model with experts, or without, of an architecture that is known only the other
    /// way.
    pub(super) fn of(metadata: &Metadata) -> Result<&'static Self> {
        let (architecture, experts) = (metadata.architecture, metadata.count("expert_count")?.unwrap_or(0));
        let mut known = FAMILIES.iter().filter(|family| family.architecture == architecture).peekable();
        if known.peek().is_none() {
            let mut all = FAMILIES.map(|family| family.architecture).to_vec();
            all.dedup();
            let problem = format!("general.architecture '{architecture}' is unknown: possible are {}", all.join(", "));
            return Err(metadata.file().broken(&problem));
        }
        known.find(|family| family.sparse == (experts > 0)).ok_or_else(|| {
            metadata
                .file()
                .broken(&format!("{architecture}.expert_count is {experts}, which no model of {architecture} is"))
        })
    }

    /// The role of a tensor in a file; `None` if no model of the family has it. `has` tells which tensors are in the file.
    pub(super) fn tensor(&self, stored: &str, has: impl Fn(&str) -> bool) -> Option<StoredTensor> {
        let parameter = |name: String| Some(StoredTensor::Parameter(name));
        match stored {
            "token_embd.weight" => return parameter(EMBEDDING.into()),
            "output_norm.weight" => return parameter(NORM.into()),
            "output.weight" => return parameter(HEAD.into()),
            _ => {}
        }
        let (layer, rest) = stored.strip_prefix("blk.")?.split_once('.')?;
        let number: usize = layer.parse().ok()?;
        let of_layer = |tensor: &str| format!("blk.{layer}.{tensor}");
        let named = |name: &str| format!("model.layers.{number}.{name}");
        if let Some(two) = self.split.iter().find(|two| two.stored.contains(&rest)) {
            let [first, second] = two.stored.map(of_layer);
            return Some(match two.unless.is_some_and(|full_names| has(&of_layer(full_names))) {
                true => StoredTensor::Spare,
                false if stored == second => StoredTensor::Second { first },
                false => StoredTensor::First { parameter: named(two.parameter), second, joined: two.joined },
            });
        }
        if let Some((_, name)) = self.full_names.iter().find(|(tensor, _)| *tensor == rest) {
            return parameter(named(name));
        }
        let (part, kind) = rest.rsplit_once('.').filter(|(_, kind)| ["weight", "bias"].contains(kind))?;
        parameter(named(&format!("{}.{kind}", self.part(part)?)))
    }

    /// The Hugging Face name of a module of a layer.
    fn part(&self, stored: &str) -> Option<&'static str> {
        let found =
            |modules: &[(&str, &'static str)]| modules.iter().find(|(name, _)| *name == stored).map(|(_, part)| *part);
        found(self.modules).or_else(|| found(&COMMON))
    }
}

/// Adds no key, for families whose keys are those of all models.
fn no_extra_keys(_: &Metadata, _: &mut Value) -> Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file may have the matrix `kv_b_proj` whole, in two parts, or both.
    #[test]
    fn the_two_parts_of_a_tensor_are_ignored_if_the_file_has_it_whole() {
        let tensor = |name: &str, full_names: bool| {
            deepseek::DEEPSEEK2.tensor(name, |other| full_names && other.ends_with("attn_kv_b.weight"))
        };
        for part in ["attn_k_b", "attn_v_b"] {
            assert!(matches!(tensor(&format!("blk.3.{part}.weight"), true), Some(StoredTensor::Spare)));
        }
        let Some(StoredTensor::First { parameter, second, .. }) = tensor("blk.3.attn_k_b.weight", false) else {
            panic!("the first of two")
        };
        assert_eq!((&*parameter, &*second), ("model.layers.3.self_attn.kv_b_proj.weight", "blk.3.attn_v_b.weight"));
        let Some(StoredTensor::Parameter(full_names)) = tensor("blk.3.attn_kv_b.weight", true) else {
            panic!("a parameter")
        };
        assert_eq!(full_names, parameter);
    }
}
