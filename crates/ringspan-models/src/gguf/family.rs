//! The families that GGUF files are read of: what each calls its tensors, what llama.cpp's converter changed in them, and which
//! keys of `config.json` its metadata are.

mod gemma;
mod glm4;
mod llama;
mod olmo2;
mod phi3;
mod qwen;

use super::metadata::Metadata;
use crate::error::Result;
use serde_json::Value;

/// How models of a family lie in GGUF files.
pub(super) struct GgufFamily {
    /// `general.architecture`.
    pub(super) architecture: &'static str,
    /// Whether its feed-forward layers are experts.
    pub(super) sparse: bool,
    /// `model_type` in `config.json`.
    pub(super) model_type: &'static str,
    /// Its name in `architectures` there.
    pub(super) class: &'static str,
    /// The keys that it has beside those of all models, into `config.json`.
    pub(super) config: fn(&Metadata, &mut Value) -> Result<()>,
    /// Parts of a layer by their names here and at Hugging Face, where they are not those of [`COMMON`]; `{}` is an expert's
    /// number.
    pub(super) parts: &'static [(&'static str, &'static str)],
    /// Where the two elements are that a rotary embedding turns together.
    pub(super) pairs: Pairs,
    /// Whether the file has weights of norms with 1 added.
    pub(super) one_in_norms: bool,
    /// Whether part of a head turns.
    pub(super) partial_rotary: bool,
}

/// Where the elements of a pair are that turn together, in the rows of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pairs {
    /// Where Hugging Face's models have them.
    Unchanged,
    /// Beside each other, where Hugging Face's models have them half a head apart.
    Neighbours,
}

/// The families there are.
const FAMILIES: [GgufFamily; 12] = [
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
];

/// Parts of a layer that most models have.
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
    /// The family of a file.
    ///
    /// # Errors
    /// An architecture that is unknown, and experts in one whose experts are.
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

    /// Hugging Face's name of a part of a layer.
    pub(super) fn part(&self, stored: &str) -> Option<&'static str> {
        let found =
            |parts: &[(&str, &'static str)]| parts.iter().find(|(name, _)| *name == stored).map(|(_, part)| *part);
        found(self.parts).or_else(|| found(&COMMON))
    }
}

/// For families whose keys are those of all models.
fn no_more(_: &Metadata, _: &mut Value) -> Result<()> {
    Ok(())
}
