//! A model in a GGUF file, whose tensors are read when they are asked for.

use super::family::{GgufFamily, RotaryPairs, StoredTensor};
use super::file::GgufFile;
use super::joined::{self, Joined};
use super::metadata::Metadata;
use super::{json, rope};
use crate::config::Config;
use crate::decoder::Decoder;
use crate::error::{Error, Result};
use candle_core::Tensor;
use ringspan_candle::Weight;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A model in a GGUF file whose tensors are still on disk. Its parameters have the names and shapes of Hugging Face's model.
pub struct GgufModel {
    file: GgufFile,
    family: &'static GgufFamily,
    config: Config,
    shapes: BTreeMap<String, Vec<usize>>,
    /// The parameters that layers can compute with in their stored type.
    matrices: BTreeSet<String>,
    sources: BTreeMap<String, Source>,
}

/// Where the numbers of a parameter are.
enum Source {
    /// A tensor of the file.
    Tensor(String),
    /// The matrix of one expert in a tensor `[experts, rows, columns]`.
    Expert(String, usize),
    /// Two tensors.
    Joined([String; 2], Joined),
}

impl std::fmt::Debug for GgufModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GgufModel").field("path", &self.file.path()).finish_non_exhaustive()
    }
}

impl GgufModel {
    /// Opens a file, and finds its model's parameters.
    ///
    /// # Errors
    /// A file that is missing, corrupt or of an unknown model, tensors that are missing or unknown.
    pub fn open(path: &Path) -> Result<Self> {
        let file = GgufFile::open(path)?;
        let metadata = Metadata::new(&file);
        let family = GgufFamily::of(&metadata)?;
        let config: Config = serde_json::from_value(json(&metadata, family)?).map_err(|error| file.broken(&error))?;
        let decoder = Decoder::new(config.clone()).map_err(|error| file.broken(&error))?;
        let (shapes, matrices) = (decoder.shapes(), decoder.stored_matrices());
        let sources = sources(&file, family, shapes.len())?;
        if let Some((name, shape)) = shapes.iter().find(|(name, _)| !sources.contains_key(*name)) {
            return Err(Error::Missing { name: name.clone(), shape: shape.clone() });
        }
        if let Some((name, source)) = sources.iter().find(|(name, _)| !shapes.contains_key(*name)) {
            let shape = file.shape(source.tensor()).unwrap_or_default().to_vec();
            return Err(Error::Unknown { name: name.clone(), shape });
        }
        Ok(Self { file, family, config, shapes, matrices, sources })
    }

    /// The model's sizes and switches.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The names of all parameters.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.sources.keys()
    }

    /// Reads a parameter as the file stores it; norms and biases, and types of quantization for which there is no
    /// [`Format`](ringspan_candle::quantized::Format), are decoded to f32.
    ///
    /// # Errors
    /// A parameter that does not exist or has another shape than the model's, and failures of the file system.
    pub fn read(&self, name: &str) -> Result<Weight> {
        let unknown = || Error::Unknown { name: name.to_owned(), shape: Vec::new() };
        let source = self.sources.get(name).ok_or_else(unknown)?;
        let refused = |error: candle_core::Error| self.file.broken(&format!("{}: {error}", source.tensor()));
        let weight = match source {
            Source::Tensor(stored) => {
                let (weight, shape) = self.tensor(stored)?;
                let weight = converted(self.family, &self.config, name, weight).map_err(refused)?;
                match (self.matrices.contains(name), shape.len()) {
                    (true, 3) => joined::experts(weight, &shape).map_err(refused)?,
                    (true, _) => weight,
                    (false, _) => shaped(&weight, &shape).map_err(refused)?,
                }
            }
            Source::Expert(stored, expert) => {
                let rows = self.file.shape(stored).map_or(0, |shape| shape[1]);
                self.file.rows(stored, expert * rows..(expert + 1) * rows)?
            }
            Source::Joined([first, second], joined) => {
                joined.parameter([self.tensor(first)?, self.tensor(second)?]).map_err(refused)?
            }
        };
        match self.shapes.get(name) {
            Some(expected) if *expected != weight.dims() => {
                Err(Error::Shape { name: name.to_owned(), expected: expected.clone(), actual: weight.dims() })
            }
            _ => Ok(weight),
        }
    }

    /// A tensor as rows of its last dimension, and its shape.
    fn tensor(&self, name: &str) -> Result<(Weight, Vec<usize>)> {
        Ok((self.file.matrix(name)?, self.file.shape(name).unwrap_or_default().to_vec()))
    }
}

impl Source {
    /// The tensor, or the first of two.
    fn tensor(&self) -> &str {
        match self {
            Self::Tensor(name) | Self::Expert(name, _) | Self::Joined([name, _], _) => name,
        }
    }
}

/// The places of all parameters, by the names of Hugging Face's model, which has `parameters` of them.
fn sources(file: &GgufFile, family: &GgufFamily, parameters: usize) -> Result<BTreeMap<String, Source>> {
    let mut sources = BTreeMap::new();
    for stored in file.names().filter(|name| !rope::is_factors(name)) {
        let tensor = family.tensor(stored, |name| file.shape(name).is_some());
        let name = match tensor.ok_or_else(|| file.broken(&format!("tensor {stored} is unknown")))? {
            StoredTensor::Spare => continue,
            StoredTensor::Second { first } if file.shape(&first).is_some() => continue,
            StoredTensor::Second { first } => {
                return Err(file.broken(&format!("tensor {first} is missing, and {stored} is there")));
            }
            StoredTensor::First { second, .. } if file.shape(&second).is_none() => {
                return Err(file.broken(&format!("tensor {second} is missing, and {stored} is there")));
            }
            StoredTensor::First { parameter, second, joined } => {
                sources.insert(parameter, Source::Joined([stored.clone(), second], joined));
                continue;
            }
            StoredTensor::Parameter(name) => name,
        };
        match (name.split_once("{}"), file.shape(stored)) {
            (Some((before, after)), Some(&[experts, _, _])) => {
                let each = |expert| (format!("{before}{expert}{after}"), Source::Expert(stored.clone(), expert));
                // A damaged file may speak of any number of experts.
                sources.extend((0..experts.min(parameters + 1)).map(each));
            }
            (Some(_), _) => return Err(file.broken(&format!("{stored}: experts are [experts, rows, columns]"))),
            (None, _) => {
                sources.insert(name, Source::Tensor(stored.clone()));
            }
        }
    }
    Ok(sources)
}

/// A tensor as the Hugging Face model has it: the changes of llama.cpp's converter are undone.
fn converted(family: &GgufFamily, config: &Config, name: &str, weight: Weight) -> candle_core::Result<Weight> {
    if family.norms_plus_one && name.ends_with("norm.weight") {
        return Ok((weight.to_tensor()? - 1.0)?.into());
    }
    let heads = match () {
        () if family.pairs == RotaryPairs::Unchanged => return Ok(weight),
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

/// A tensor in f32, reshaped to its stored shape.
fn shaped(weight: &Weight, shape: &[usize]) -> candle_core::Result<Weight> {
    weight.to_tensor()?.reshape(shape).map(Weight::Dense)
}
