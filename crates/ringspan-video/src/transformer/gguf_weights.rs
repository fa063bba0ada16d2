//! A transformer's weights in one GGUF file, as the community quantizes them: with the names of the original checkpoints, and without
//! a configuration, which is read from the shapes.

use super::config::WanConfig;
use crate::error::{Error, Result};
use crate::original_names::original_parameter;
use candle_core::Tensor;
use ringspan_candle::Weight;
use ringspan_models::gguf::GgufTensors;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The tensors of a file, by the names of diffusers.
#[derive(Debug)]
pub(super) struct GgufWeights {
    path: PathBuf,
    tensors: GgufTensors,
    /// What precedes all names of the file.
    prefix: &'static str,
    /// Whether the file has the names of diffusers instead of the original ones.
    of_diffusers: bool,
}

const ARCHITECTURE: &str = "wan";
/// What some converters leave before names.
const PREFIX: &str = "model.diffusion_model.";
/// A name that only diffusers has.
const OF_DIFFUSERS: &str = "condition_embedder.time_proj.weight";
/// The width of a head in all of WAN's models; the shapes do not tell it.
const HEAD_DIM: usize = 128;

impl GgufWeights {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let tensors = GgufTensors::open(path, ARCHITECTURE)?;
        let prefix = if tensors.names().any(|name| name.starts_with(PREFIX)) { PREFIX } else { "" };
        let of_diffusers = tensors.shape(&format!("{prefix}{OF_DIFFUSERS}")).is_some();
        Ok(Self { path: path.to_owned(), tensors, prefix, of_diffusers })
    }

    /// The name in the file of a parameter of diffusers.
    fn stored_name(&self, name: &str) -> String {
        let name = if self.of_diffusers { name.to_owned() } else { original_parameter(name) };
        format!("{}{name}", self.prefix)
    }

    fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.shape(&self.stored_name(name))
    }

    fn refuse<T>(&self, problem: String) -> Result<T> {
        Err(Error::Format { path: self.path.clone(), problem })
    }

    /// The configuration that the shapes amount to.
    pub(super) fn config(&self) -> Result<WanConfig> {
        let dim = |name: &str, dim: usize| match self.shape(name).and_then(|shape| shape.get(dim)) {
            Some(size) => Ok(*size),
            None => self.refuse(format!("tensor {} is missing, whose shape tells a size", self.stored_name(name))),
        };
        let patches = "patch_embedding.weight";
        let Some(&[width, in_channels, frames, rows, columns]) = self.shape(patches) else {
            return self.refuse(format!(
                "tensor {} has shape {:?}, expected [width, channels, frames, rows, columns]; some converters keep it in a \
                 file of its own",
                self.stored_name(patches),
                self.shape(patches).unwrap_or_default()
            ));
        };
        if width % HEAD_DIM != 0 || width == 0 {
            return self.refuse(format!(
                "the width is {width}, which is not whole heads of {HEAD_DIM}; a config.json beside the file can say another \
                 attention_head_dim"
            ));
        }
        let patch = frames * rows * columns;
        let layers = self.count("blocks");
        let mut config = json!({
            "_class_name": "WanTransformer3DModel",
            "patch_size": [frames, rows, columns],
            "num_attention_heads": width / HEAD_DIM,
            "attention_head_dim": HEAD_DIM,
            "in_channels": in_channels,
            "out_channels": dim("proj_out.weight", 0)? / patch.max(1),
            "text_dim": dim("condition_embedder.text_embedder.linear_1.weight", 1)?,
            "freq_dim": dim("condition_embedder.time_embedder.linear_1.weight", 1)?,
            "ffn_dim": dim("blocks.0.ffn.net.0.proj.weight", 0)?,
            "num_layers": layers,
            "cross_attn_norm": self.shape("blocks.0.norm2.weight").is_some(),
        });
        if self.shape("condition_embedder.image_embedder.norm1.weight").is_some() {
            config["image_dim"] = json!(dim("condition_embedder.image_embedder.norm1.weight", 0)?);
            config["added_kv_proj_dim"] = json!(dim("blocks.0.attn2.add_k_proj.weight", 1)?);
        }
        if let Some(&[_, positions, _]) = self.shape("condition_embedder.image_embedder.pos_embed") {
            config["pos_embed_seq_len"] = json!(positions);
        }
        let control_blocks = self.count("vace_blocks");
        // Both models of VACE add their control blocks at equal distances.
        if let Some(each) = layers.checked_div(control_blocks) {
            config["_class_name"] = json!("WanVACETransformer3DModel");
            config["vace_layers"] = json!((0..control_blocks).map(|block| block * each).collect::<Vec<_>>());
            config["vace_in_channels"] = json!(dim("vace_patch_embedding.weight", 1)?);
        }
        let keys: Map<String, Value> = config.as_object().cloned().unwrap_or_default();
        WanConfig::from_json(keys)
            .map_err(|error| Error::Format { path: self.path.clone(), problem: error.to_string() })
    }

    /// Number of blocks of a list.
    fn count(&self, list: &str) -> usize {
        let start = format!("{}{list}.", self.prefix);
        let numbers =
            self.tensors.names().filter_map(|name| name.strip_prefix(&start)?.split('.').next()?.parse().ok());
        numbers.collect::<BTreeSet<usize>>().len()
    }

    /// Checks that the file has the tensors of these names and shapes, and no others except those that `ignored` names.
    pub(super) fn check(&self, wanted: &BTreeMap<String, Vec<usize>>, ignored: impl Fn(&str) -> bool) -> Result<()> {
        for (name, expected) in wanted {
            let stored = self.stored_name(name);
            match self.tensors.shape(&stored) {
                None => return self.refuse(format!("tensor {stored} {expected:?} is missing")),
                Some(shape) if shape != expected => {
                    return self
                        .refuse(format!("tensor {stored} has shape {shape:?}, and the model needs {expected:?}"));
                }
                Some(_) => self.tensors.stored_bytes(&stored)?,
            };
        }
        let known: BTreeSet<String> = wanted.keys().map(|name| self.stored_name(name)).collect();
        match self.tensors.names().find(|name| !known.contains(*name) && !ignored(name)) {
            Some(name) => {
                let shape = self.tensors.shape(name).unwrap_or_default();
                self.refuse(format!("tensor {name} {shape:?} belongs to no part of the model"))
            }
            None => Ok(()),
        }
    }

    pub(super) fn stored_bytes(&self, name: &str) -> Result<u64> {
        Ok(self.tensors.stored_bytes(&self.stored_name(name))?)
    }

    pub(super) fn read(&self, name: &str) -> Result<Tensor> {
        Ok(self.tensors.read(&self.stored_name(name))?)
    }

    pub(super) fn read_stored(&self, name: &str) -> Result<Weight> {
        Ok(self.tensors.read_stored(&self.stored_name(name))?)
    }
}
