//! Model folders as Hugging Face lays them out: `config.json`, and safetensors in one file or in shards with an index.

use crate::config::Config;
use crate::decoder::{Decoder, Weights};
use crate::error::{Error, Result};
use candle_core::{Device, Tensor};
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::{BTreeSet, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Reads a model: its configuration, and its weights as f32.
///
/// # Errors
/// Files that are missing or corrupt, and tensors that are missing, unknown or of another shape or type.
pub fn load(folder: &Path) -> Result<(Config, Weights)> {
    let path = folder.join(CONFIG);
    let config: Config = parse(&path)?;
    let decoder = Decoder::new(config.clone()).map_err(|error| match error {
        Error::Config(problem) => Error::Format { path, problem },
        other => other,
    })?;
    let mut weights = Weights::new();
    for file in files(folder)? {
        read_tensors(&file, &mut weights)?;
    }
    if config.tie_word_embeddings {
        // Some folders hold the tied matrix twice.
        weights.remove("lm_head.weight");
    }
    weights.retain(|name, _| !name.ends_with("rotary_emb.inv_freq"));
    let shapes = decoder.shapes();
    for (name, expected) in &shapes {
        match weights.get(name).map(Tensor::dims) {
            None => return Err(Error::Missing { name: name.clone(), shape: expected.clone() }),
            Some(actual) if actual != expected => {
                let (name, expected, actual) = (name.clone(), expected.clone(), actual.to_vec());
                return Err(Error::Shape { name, expected, actual });
            }
            Some(_) => {}
        }
    }
    match weights.iter().find(|(name, _)| !shapes.contains_key(*name)) {
        Some((name, tensor)) => Err(Error::Unknown { name: name.clone(), shape: tensor.dims().to_vec() }),
        None => Ok((config, weights)),
    }
}

/// `config.json` as it is, to be saved with the model again.
///
/// # Errors
/// A file that is missing or no JSON.
pub fn config_json(folder: &Path) -> Result<serde_json::Value> {
    parse(&folder.join(CONFIG))
}

/// Writes a model in f32. Files are written beside and renamed: a failure leaves those that were there.
///
/// # Errors
/// What the file system says, with the file.
pub fn save(folder: &Path, config: &serde_json::Value, weights: &Weights) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.to_owned(), source })?;
    let mut config = config.clone();
    if let Some(keys) = config.as_object_mut() {
        let key = if keys.contains_key("dtype") { "dtype" } else { "torch_dtype" };
        keys.insert(key.to_owned(), "float32".into());
    }
    let path = folder.join(SINGLE);
    let format = |problem: String| Error::Format { path: path.clone(), problem };
    let values = weights.iter().map(|(name, tensor)| {
        let values: Vec<f32> = tensor.flatten_all()?.to_vec1()?;
        Ok((name, tensor.dims().to_vec(), values))
    });
    let values = values.collect::<Result<Vec<_>>>()?;
    let views = values.iter().map(|(name, shape, values)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytemuck::cast_slice(values));
        view.map(|view| (name.as_str(), view)).map_err(|error| format(error.to_string()))
    });
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let bytes = safetensors::serialize(views.collect::<Result<Vec<_>>>()?, Some(metadata))
        .map_err(|error| format(error.to_string()))?;
    let text = serde_json::to_string_pretty(&config).map_err(|error| format(error.to_string()))?;
    // All is on disk before anything gets its name, so a full disk changes nothing.
    let config_path = folder.join(CONFIG);
    let new = [(write_beside(&config_path, text.as_bytes())?, config_path), (write_beside(&path, &bytes)?, path)];
    for (file, path) in new {
        file.persist(&path).map_err(|error| Error::Io { path: path.clone(), source: error.error })?;
    }
    // The new names are on disk only when the folder is.
    #[cfg(unix)]
    std::fs::File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(|source| Error::Io { path: folder.to_owned(), source })?;
    Ok(())
}

/// The safetensors of a folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let index = folder.join(INDEX);
    if folder.join(SINGLE).is_file() || !index.is_file() {
        return Ok(vec![folder.join(SINGLE)]);
    }
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let Index { weight_map } = parse(&index)?;
    let names: BTreeSet<String> = weight_map.into_values().collect();
    let file = |name: String| {
        // A name with a path in it could lead anywhere.
        if Path::new(&name).file_name().is_none_or(|plain| plain != name.as_str()) {
            let problem = format!("'{name}' is not a plain file name");
            return Err(Error::Format { path: index.clone(), problem });
        }
        Ok(folder.join(name))
    };
    names.into_iter().map(file).collect()
}

fn read_tensors(path: &Path, weights: &mut Weights) -> Result<()> {
    let format = |problem: String| Error::Format { path: path.to_owned(), problem };
    let bytes = read(path)?;
    let tensors = SafeTensors::deserialize(&bytes)
        .map_err(|error| format(format!("not a whole safetensors file of {} bytes: {error}", bytes.len())))?;
    for (name, view) in tensors.tensors() {
        let data = view.data();
        let pair = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
        let values: Vec<f32> = match view.dtype() {
            Dtype::F32 => data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            Dtype::BF16 => data.chunks_exact(2).map(|b| bf16::from_bits(pair(b)).to_f32()).collect(),
            Dtype::F16 => data.chunks_exact(2).map(|b| f16::from_bits(pair(b)).to_f32()).collect(),
            other => return Err(format(format!("tensor {name} is {other:?}: possible are F32, BF16, F16"))),
        };
        let tensor = Tensor::from_vec(values, view.shape(), &Device::Cpu)?;
        if weights.insert(name.clone(), tensor).is_some() {
            return Err(format(format!("tensor {name} is in another file, too")));
        }
    }
    Ok(())
}

fn parse<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    serde_json::from_slice(&read(path)?)
        .map_err(|error| Error::Format { path: path.to_owned(), problem: error.to_string() })
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|source| Error::Io { path: path.to_owned(), source })
}

/// Writes what is to become `path` to a temporary file in the same folder, and makes sure it is on disk.
fn write_beside(path: &Path, bytes: &[u8]) -> Result<NamedTempFile> {
    let io = |source| Error::Io { path: path.to_owned(), source };
    let mut file = beside().tempfile_in(path.parent().unwrap_or(Path::new("."))).map_err(io)?;
    file.write_all(bytes).and_then(|()| file.as_file().sync_all()).map_err(io)?;
    Ok(file)
}

/// Temporary files with the permissions of any new file, not for their owner's eyes only.
#[cfg(unix)]
fn beside() -> tempfile::Builder<'static, 'static> {
    use std::os::unix::fs::PermissionsExt;
    let mut builder = tempfile::Builder::new();
    builder.permissions(std::fs::Permissions::from_mode(0o666));
    builder
}

#[cfg(not(unix))]
fn beside() -> tempfile::Builder<'static, 'static> {
    tempfile::Builder::new()
}
