//! Writes a model's folder, one tensor at a time.

use super::{CONFIG, INDEX, SINGLE};
use crate::error::{Error, Result};
use crate::registry::with_family_defaults;
use crate::tensor_file::TensorFile;
use candle_core::{DType, Tensor};
use half::bf16;
use half::slice::HalfFloatSliceExt;
use ringspan_candle::Weights;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use tempfile::NamedTempFile;

/// Upper limit of a file's data in bytes, beyond which a model is split into several files.
const SHARD: u64 = 5_000_000_000;

/// The type in which a model is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SavedType {
    /// The type in which models are trained.
    #[default]
    F32,
    /// Rounded to bf16, in half the bytes.
    Bf16,
}

impl SavedType {
    /// The type that `config.json` records for its weights: bf16 if it says so, else f32.
    pub fn of(config: &Value) -> Self {
        let word = ["dtype", "torch_dtype"].iter().find_map(|key| config.get(*key)?.as_str());
        if word == Some("bfloat16") { Self::Bf16 } else { Self::F32 }
    }

    fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
        }
    }

    fn width(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    fn bytes(self, shape: &[usize]) -> usize {
        shape.iter().product::<usize>() * self.width()
    }
}

impl FromStr for SavedType {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        match word {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            _ => Err(Error::Config(format!("'{word}' is no type that models are saved in: possible are f32, bf16"))),
        }
    }
}

impl fmt::Display for SavedType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::F32 { "f32" } else { "bf16" })
    }
}

/// Writes a model in f32. Files are written under temporary names and then renamed, so a failure leaves existing files as they
/// are.
///
/// # Errors
/// Failures of the file system, with the file.
pub fn save(folder: &Path, config: &Value, weights: &Weights) -> Result<()> {
    let shapes = weights.iter().map(|(name, tensor)| (name.clone(), tensor.dims().to_vec())).collect();
    let mut writer = Writer::new(folder, config, &shapes, SavedType::F32, SHARD)?;
    weights.iter().try_for_each(|(name, tensor)| writer.write(name, tensor))?;
    writer.finish()
}

/// Writes a model's folder: tensors come one at a time, in any order, and none stays in memory.
///
/// No file has its final name before [`Writer::finish`]; a writer that is dropped leaves no file.
#[derive(Debug)]
pub struct Writer {
    folder: PathBuf,
    saved: SavedType,
    config: NamedTempFile,
    index: Option<NamedTempFile>,
    shards: Vec<(String, NamedTempFile)>,
    /// For each tensor that is not written yet: the index of its file, its offset there, and its shape.
    missing: BTreeMap<String, (usize, u64, Vec<usize>)>,
}

impl Writer {
    /// Prepares a folder for tensors of these shapes, stored as `saved`, in files of at most `limit` bytes of data, or more for
    /// a single tensor. If one file is enough, there is no index.
    ///
    /// # Errors
    /// Failures of the file system, with the file.
    pub fn new(
        folder: &Path,
        config: &Value,
        shapes: &BTreeMap<String, Vec<usize>>,
        saved: SavedType,
        limit: u64,
    ) -> Result<Self> {
        std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.to_owned(), source })?;
        let mut config = with_family_defaults(config.clone());
        if let Some(keys) = config.as_object_mut() {
            let key = if keys.contains_key("dtype") { "dtype" } else { "torch_dtype" };
            let name = if saved == SavedType::F32 { "float32" } else { "bfloat16" };
            keys.insert(key.to_owned(), name.into());
            // Weights are written unquantised, whatever was read.
            keys.remove("quantization_config");
        }
        let groups = groups(shapes, saved, limit);
        let name = |n: usize| match groups.len() {
            1 => SINGLE.to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", n + 1),
        };
        let (mut shards, mut missing, mut map) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        for (n, group) in groups.iter().enumerate() {
            let path = folder.join(name(n));
            let (header, starts) =
                header(group, saved).map_err(|problem| Error::Format { path: path.clone(), problem })?;
            shards.push((name(n), create_temporary(&path, &header)?));
            for ((tensor, shape), start) in group.iter().zip(starts) {
                missing.insert((*tensor).clone(), (n, start, (*shape).clone()));
                map.insert((*tensor).clone(), name(n));
            }
        }
        let total: usize = shapes.values().map(|shape| saved.bytes(shape)).sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
        let index = match shards.len() {
            1 => None,
            _ => Some(create_temporary(&folder.join(INDEX), format!("{index:#}").as_bytes())?),
        };
        let config = create_temporary(&folder.join(CONFIG), format!("{config:#}").as_bytes())?;
        Ok(Self { folder: folder.to_owned(), saved, config, index, shards, missing })
    }

    /// Writes a tensor at its offset in its file.
    ///
    /// # Errors
    /// A tensor that is unknown, already written or of another shape, and failures of the file system.
    pub fn write(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let Some((shard, start, expected)) = self.missing.get(name) else {
            return Err(Error::Unknown { name: name.to_owned(), shape: tensor.dims().to_vec() });
        };
        if tensor.dims() != expected {
            let (name, expected, actual) = (name.to_owned(), expected.clone(), tensor.dims().to_vec());
            return Err(Error::Shape { name, expected, actual });
        }
        let values: Vec<f32> = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        let (shard, file) = &mut self.shards[*shard];
        let path = self.folder.join(shard);
        let mut write = |bytes: &[u8]| file.seek(SeekFrom::Start(*start)).and_then(|_| file.write_all(bytes));
        let written = match self.saved {
            SavedType::F32 => write(bytemuck::cast_slice(&values)),
            SavedType::Bf16 => {
                let mut rounded = vec![bf16::ZERO; values.len()];
                rounded.convert_from_f32_slice(&values);
                write(bytemuck::cast_slice(&rounded))
            }
        };
        written.map_err(|source| Error::Io { path, source })?;
        self.missing.remove(name);
        Ok(())
    }

    /// Gives all files their final names.
    ///
    /// # Errors
    /// A tensor that was not written, and failures of the file system.
    pub fn finish(self) -> Result<()> {
        let Self { folder, config, index, shards, missing, .. } = self;
        if let Some((name, (.., shape))) = missing.into_iter().next() {
            return Err(Error::Missing { name, shape });
        }
        let sharded = index.is_some();
        let mut files = vec![(CONFIG.to_owned(), config)];
        files.extend(shards);
        files.extend(index.map(|index| (INDEX.to_owned(), index)));
        // All data is on disk before any file gets its name, so a full disk changes nothing.
        for (name, file) in &files {
            let io = |source| Error::Io { path: folder.join(name), source };
            file.as_file().sync_all().map_err(io)?;
        }
        for (name, file) in files {
            let path = folder.join(name);
            file.persist(&path).map_err(|error| Error::Io { path: path.clone(), source: error.error })?;
        }
        let single = folder.join(SINGLE);
        if sharded && single.exists() {
            // Readers prefer the single file to several ones, so an old one must not stay.
            std::fs::remove_file(&single).map_err(|source| Error::Io { path: single, source })?;
        }
        // The new names are on disk only once the folder is synced, too.
        #[cfg(unix)]
        std::fs::File::open(&folder)
            .and_then(|folder| folder.sync_all())
            .map_err(|source| Error::Io { path: folder, source })?;
        Ok(())
    }
}

type Group<'a> = Vec<(&'a String, &'a Vec<usize>)>;

/// Tensors in the order of their names, split before each one that would exceed `limit`.
fn groups(shapes: &BTreeMap<String, Vec<usize>>, saved: SavedType, limit: u64) -> Vec<Group<'_>> {
    let (mut groups, mut full) = (vec![Vec::new()], 0);
    for (name, shape) in shapes {
        let bytes = saved.bytes(shape) as u64;
        if full > 0 && full + bytes > limit {
            groups.push(Vec::new());
            full = 0;
        }
        full += bytes;
        if let Some(group) = groups.last_mut() {
            group.push((name, shape));
        }
    }
    groups
}

/// The header of a safetensors file, with its length before it, and the offset of each tensor in the file.
fn header(group: &Group<'_>, saved: SavedType) -> std::result::Result<(Vec<u8>, Vec<u64>), String> {
    let (mut infos, mut starts, mut start) = (Vec::new(), Vec::new(), 0);
    for (name, shape) in group {
        let end = start + saved.bytes(shape);
        infos.push((
            (*name).clone(),
            TensorInfo { dtype: saved.dtype(), shape: (*shape).clone(), data_offsets: (start, end) },
        ));
        starts.push(start as u64);
        start = end;
    }
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(metadata), infos).map_err(|error| error.to_string())?;
    let mut text = serde_json::to_vec(&metadata).map_err(|error| error.to_string())?;
    // Data begins at a multiple of 8 bytes.
    text.resize(text.len().next_multiple_of(8), b' ');
    if let Some(problem) = TensorFile::refused(text.len()) {
        return Err(problem);
    }
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    let data = header.len() as u64;
    Ok((header, starts.into_iter().map(|start| data + start).collect()))
}

/// Writes a file under a temporary name and renames it to `path`.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let io = |source| Error::Io { path: path.to_owned(), source };
    let file = create_temporary(path, bytes)?;
    file.as_file().sync_all().map_err(io)?;
    file.persist(path).map_err(|error| io(error.error))?;
    Ok(())
}

/// Creates the temporary file that will be renamed to `path`, in the same folder, and writes its first bytes.
fn create_temporary(path: &Path, bytes: &[u8]) -> Result<NamedTempFile> {
    let io = |source| Error::Io { path: path.to_owned(), source };
    let mut file = temporary_file().tempfile_in(path.parent().unwrap_or(Path::new("."))).map_err(io)?;
    file.write_all(bytes).map_err(io)?;
    Ok(file)
}

/// A builder of temporary files with the permissions of ordinary new files, which not only their owner can read.
#[cfg(unix)]
fn temporary_file() -> tempfile::Builder<'static, 'static> {
    use std::os::unix::fs::PermissionsExt;
    let mut builder = tempfile::Builder::new();
    builder.permissions(std::fs::Permissions::from_mode(0o666));
    builder
}

#[cfg(not(unix))]
fn temporary_file() -> tempfile::Builder<'static, 'static> {
    tempfile::Builder::new()
}
