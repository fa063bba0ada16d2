//! The folder of a transformer, and its weights in memory.

use super::weight_files::{WEIGHTS, WeightFiles};
use super::weight_message::encoded_bytes;
use super::weight_shares::WeightShares;
use super::{ShardedWeights, WanTransformer};
use crate::error::{Error, Result};
use crate::gguf_folder::gguf_of;
use crate::lora::{LoraSource, TransformerChange};
use candle_core::DType;
use ringspan::comm::Communicator;
use ringspan_candle::cast::cast;
use ringspan_candle::lora::weight_names;
use ringspan_candle::model::Parameter;
use ringspan_candle::{Adapters, Model, StoredWeights, Weight};
use ringspan_models::{LayerNames, Lora};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

/// The type of weights in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightType {
    /// f32, in which the model computes.
    F32,
    /// bf16, in which the model computes, except norms, modulation and embeddings of conditions.
    Bf16,
    /// Matrices in the type of their file, bf16, f16 and quantized ones too; the model computes in f32.
    #[default]
    AsStored,
}

impl WeightType {
    /// The type of a parameter, or of the adapter of a layer, where it does not stay in that of its file.
    fn dtype_of(self, name: &str) -> DType {
        match self {
            Self::Bf16 if !stays_f32(name) => DType::BF16,
            Self::Bf16 | Self::F32 | Self::AsStored => DType::F32,
        }
    }

    /// The type for the weights of a transformer or a pipeline at `path` if none is asked for: that of the file for GGUF, since
    /// quantized weights are several times as large in f32, and else f32.
    #[must_use]
    pub fn default_of(path: &Path) -> Self {
        // What is wrong with the files is said when they are opened.
        let has_gguf = |folder: &Path| gguf_of(folder, WEIGHTS).is_ok_and(|file| file.is_some());
        let of_pipeline = || ["transformer", "transformer_2"].iter().any(|folder| has_gguf(&path.join(folder)));
        let is_pipeline = path.join("model_index.json").is_file() || path.join("transformer").is_dir();
        match path.is_file() || if is_pipeline { of_pipeline() } else { has_gguf(path) } {
            true => Self::AsStored,
            false => Self::F32,
        }
    }

    /// Bytes of an element of queries, keys and values, which ranks send to each other in the type the model computes in.
    #[must_use]
    pub fn computed_bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 | Self::AsStored => 4,
        }
    }
}

impl FromStr for WeightType {
    type Err = Error;

    fn from_str(given: &str) -> Result<Self> {
        match given {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            "as-stored" => Ok(Self::AsStored),
            _ => Err(Error::Input(format!("type '{given}' of weights: possible are f32, bf16, as-stored"))),
        }
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::AsStored => "as-stored",
        })
    }
}

/// A transformer's folder as diffusers saves it, or its GGUF file; its tensors are on disk.
#[derive(Debug)]
pub struct WanFolder {
    transformer: WanTransformer,
    tensors: WeightFiles,
    /// What adapters change.
    change: TransformerChange,
}

impl WanFolder {
    /// Opens a folder: reads its configuration and the headers of its files. Instead of safetensors, a folder may have one GGUF file;
    /// `path` may also be such a file, whose configuration is `config.json` beside it or else what its shapes amount to.
    ///
    /// # Errors
    /// Another model's folder, files that are missing or corrupt, tensors that are missing, unknown or of another shape.
    pub fn open(path: &Path) -> Result<Self> {
        let (config, tensors) = WeightFiles::open(path)?;
        let transformer = WanTransformer::new(config);
        // Some checkpoints have a norm of queries to images, which no version of the model computes.
        tensors.check(&transformer.shapes(), |name| name.ends_with(".norm_added_q.weight"))?;
        Ok(Self { transformer, tensors, change: TransformerChange::default() })
    }

    /// The folder with adapters instead of those that it had, if any.
    ///
    /// # Errors
    /// Files that are missing or corrupt; tensors that are no adapter's, that belong to no module of the transformer, or do not fit it.
    pub fn with_loras(self, sources: &[LoraSource]) -> Result<Self> {
        let plain = self.transformer.with_adapters(Adapters::none());
        let change = TransformerChange::open(sources, plain.all_parameters())?;
        let transformer = plain.with_adapters(change.adapters());
        Ok(Self { transformer, change, ..self })
    }

    /// The folder with adapters that are to be trained, whose matrices are not among the weights that are [loaded](Self::load).
    ///
    /// # Errors
    /// A name that no linear layer has.
    pub fn with_new_adapters(self, lora: &Lora) -> Result<Self> {
        let mut adapters = Adapters::none();
        for layer in self.transformer.all_parameters().linear_layers() {
            if lora.adapts(&layer.name)? {
                adapters.sizes.insert(layer.name.clone(), lora.size(&layer.name)?);
            }
        }
        let names = |end: &str| adapters.sizes.keys().any(|layer| layer == end || layer.ends_with(&format!(".{end}")));
        if let LayerNames::Ends(ends) = lora.targets()
            && let Some(end) = ends.iter().find(|end| !names(end))
        {
            let layers = self.transformer.all_parameters().linear_layers();
            let known: BTreeSet<_> = layers.map(|layer| in_every_block(&layer.name)).collect();
            let known = known.into_iter().collect::<Vec<_>>().join(", ");
            return Err(Error::Input(format!(
                "no linear layer is called '{end}'; among those of the model are {known}"
            )));
        }
        Ok(Self { transformer: self.transformer.with_adapters(adapters), ..self })
    }

    /// The transformer.
    pub fn transformer(&self) -> &WanTransformer {
        &self.transformer
    }

    /// Bytes that the weights take in memory, with the matrices of adapters.
    #[must_use]
    pub fn bytes(&self, of: WeightType) -> u64 {
        let shapes = self.transformer.shapes();
        shapes.iter().map(|(name, shape)| self.bytes_of(name, shape, of)).sum::<u64>() + self.adapter_bytes(of)
    }

    /// Bytes that the matrices of adapters take in memory.
    pub(crate) fn adapter_bytes(&self, of: WeightType) -> u64 {
        let of_layers = self.transformer.all_parameters().linear_layers().filter_map(|layer| {
            let rank = self.transformer.adapter_sizes().size(&layer.name)?.rank;
            Some(of.dtype_of(&layer.name).size_in_bytes() as u64 * elements(&[rank, layer.inputs + layer.outputs]))
        });
        of_layers.sum()
    }

    /// Bytes that a parameter takes in memory.
    fn bytes_of(&self, name: &str, shape: &[usize], of: WeightType) -> u64 {
        match of {
            // The tensors were looked for when the folder was opened.
            WeightType::AsStored if !self.change.changes(name) => self.tensors.stored_bytes(name).unwrap_or(0),
            _ => of.dtype_of(name).size_in_bytes() as u64 * elements(shape),
        }
    }

    /// How ranks share the weights, if they do.
    pub(crate) fn shares(&self, of: WeightType, ranks: usize) -> WeightShares {
        let mut units = BTreeMap::new();
        for unit in self.transformer.units() {
            let parameters = self.transformer.parameters_of_files(unit);
            let bytes = |p: &Parameter| encoded_bytes(p.shape.len(), self.bytes_of(&p.name, &p.shape, of));
            let sizes = parameters.map(|parameter| (parameter.name.clone(), bytes(parameter)));
            units.insert(unit, sizes.collect());
        }
        WeightShares::new(units, ranks)
    }

    /// Reads all weights, and the matrices of adapters.
    ///
    /// # Errors
    /// Failures of the file system.
    pub fn load(&self, of: WeightType) -> Result<StoredWeights> {
        let mut weights = self.load_adapters(of)?;
        for name in self.transformer.shapes().into_keys() {
            let weight = self.read(&name, of)?;
            weights.insert(name, weight);
        }
        Ok(weights)
    }

    /// Reads the weights of which this rank of a group holds a share, and the matrices of adapters, which all ranks hold.
    ///
    /// # Errors
    /// Failures of the file system.
    pub fn load_share(&self, of: WeightType, comm: Arc<dyn Communicator>) -> Result<ShardedWeights> {
        let shares = self.shares(of, comm.size());
        ShardedWeights::new(comm, &shares, self.load_adapters(of)?, |name| self.read(name, of))
    }

    /// Reads a weight.
    fn read(&self, name: &str, of: WeightType) -> Result<Weight> {
        Ok(match of {
            WeightType::AsStored if !self.change.changes(name) => self.tensors.read_stored(name)?,
            _ => cast(&self.change.changed(name, self.tensors.read(name)?)?, of.dtype_of(name))?.into(),
        })
    }

    /// Reads the matrices of adapters.
    fn load_adapters(&self, of: WeightType) -> Result<StoredWeights> {
        let mut weights = StoredWeights::new();
        for layer in self.change.layers() {
            let of_layer = self.change.matrices(layer)?;
            for (name, matrix) in weight_names(layer).into_iter().zip(of_layer) {
                weights.insert(name, cast(&matrix, of.dtype_of(layer))?.into());
            }
        }
        Ok(weights)
    }
}

fn elements(shape: &[usize]) -> u64 {
    shape.iter().product::<usize>() as u64
}

/// The name of a layer without the block in which it is: the same for the layers of all blocks.
fn in_every_block(name: &str) -> &str {
    let of_block = name.split_once("blocks.").and_then(|(_, of_block)| of_block.split_once('.'));
    of_block.map_or(name, |(_, name)| name)
}

/// Whether a parameter acts on few rows or on sums, so that it stays f32 where the model computes in bf16.
fn stays_f32(name: &str) -> bool {
    name.starts_with("condition_embedder.") || name.ends_with("scale_shift_table") || name.contains("norm")
}
