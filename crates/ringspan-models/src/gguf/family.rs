//! The families that GGUF files are read of: what each calls its tensors, what llama.cpp's converter changed in them, and which
//! keys of `config.json` its metadata are.

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
    /// Tensors of a layer that are parameters without `weight` or `bias` in their names, here and at Hugging Face.
    pub(super) whole: &'static [(&'static str, &'static str)],
    /// Parameters of a layer that files have in two tensors.
    pub(super) in_two: &'static [TwoTensors],
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

/// A parameter of a layer that files have in two tensors.
pub(super) struct TwoTensors {
    /// Their names in the layer.
    pub(super) stored: [&'static str; 2],
    /// Its name at Hugging Face.
    pub(super) parameter: &'static str,
    pub(super) joined: Joined,
    /// A tensor that is the whole parameter, where a file has that, too.
    pub(super) unless: Option<&'static str>,
}

/// What a tensor of a file is.
pub(super) enum StoredTensor {
    /// A parameter by its name at Hugging Face; of a tensor of experts with `{}` in the place of an expert's number.
    Parameter(String),
    /// The first of the two tensors of a parameter.
    First { parameter: String, second: String, joined: Joined },
    /// The second one, which is read with the first.
    Second { first: String },
    /// A part of what is there as a whole.
    Spare,
}

/// The families there are.
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

    /// What a tensor of a file is; none where no model of the family has it. `has` says which tensors there are.
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
        if let Some(two) = self.in_two.iter().find(|two| two.stored.contains(&rest)) {
            let [first, second] = two.stored.map(of_layer);
            return Some(match two.unless.is_some_and(|whole| has(&of_layer(whole))) {
                true => StoredTensor::Spare,
                false if stored == second => StoredTensor::Second { first },
                false => StoredTensor::First { parameter: named(two.parameter), second, joined: two.joined },
            });
        }
        if let Some((_, name)) = self.whole.iter().find(|(tensor, _)| *tensor == rest) {
            return parameter(named(name));
        }
        let (part, kind) = rest.rsplit_once('.').filter(|(_, kind)| ["weight", "bias"].contains(kind))?;
        parameter(named(&format!("{}.{kind}", self.part(part)?)))
    }

    /// Hugging Face's name of a part of a layer.
    fn part(&self, stored: &str) -> Option<&'static str> {
        let found =
            |parts: &[(&str, &'static str)]| parts.iter().find(|(name, _)| *name == stored).map(|(_, part)| *part);
        found(self.parts).or_else(|| found(&COMMON))
    }
}

/// For families whose keys are those of all models.
fn no_more(_: &Metadata, _: &mut Value) -> Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file may have the matrix that makes keys and values whole and in parts.
    #[test]
    fn parts_of_what_is_there_as_a_whole_are_spare() {
        let tensor = |name: &str, whole: bool| {
            deepseek::DEEPSEEK2.tensor(name, |other| whole && other.ends_with("attn_kv_b.weight"))
        };
        for part in ["attn_k_b", "attn_v_b"] {
            assert!(matches!(tensor(&format!("blk.3.{part}.weight"), true), Some(StoredTensor::Spare)));
        }
        let Some(StoredTensor::First { parameter, second, .. }) = tensor("blk.3.attn_k_b.weight", false) else {
            panic!("the first of two")
        };
        assert_eq!((&*parameter, &*second), ("model.layers.3.self_attn.kv_b_proj.weight", "blk.3.attn_v_b.weight"));
        let Some(StoredTensor::Parameter(whole)) = tensor("blk.3.attn_kv_b.weight", true) else {
            panic!("a parameter")
        };
        assert_eq!(whole, parameter);
    }
}
