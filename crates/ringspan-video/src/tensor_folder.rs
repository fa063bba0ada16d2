//! A folder of safetensors files as diffusers saves a component of a pipeline: one file, or several that an index lists. Headers
//! are read when it is opened, tensors on request.

use crate::error::{Error, Result};
use candle_core::{Device, Tensor};
use half::{bf16, f16};
use ringspan_candle::Weight;
use ringspan_candle::quantized::{Format, QuantizedMatrix};
use ringspan_models::TensorFile;
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The tensors of a folder, which stay on disk.
#[derive(Debug)]
pub struct TensorFolder {
    path: PathBuf,
    tensors: BTreeMap<String, TensorLocation>,
}

/// The place of a tensor in its file.
#[derive(Debug)]
struct TensorLocation {
    file: PathBuf,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Offset of its first byte.
    start: u64,
}

impl TensorFolder {
    /// Opens the files `STEM.safetensors`, or those that `STEM.safetensors.index.json` lists.
    ///
    /// # Errors
    /// No such files, files that are not whole, an index that lists files elsewhere, tensors of other types than F32, BF16 and F16.
    pub fn open(path: &Path, stem: &str) -> Result<Self> {
        Ok(Self::of_files(path, files(path, stem)?)?.0)
    }

    /// Opens one file, and returns the metadata of its header with it.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub(crate) fn open_file(file: &Path) -> Result<(Self, HashMap<String, String>)> {
        Self::of_files(file, vec![file.to_owned()])
    }

    fn of_files(path: &Path, files: Vec<PathBuf>) -> Result<(Self, HashMap<String, String>)> {
        let (mut tensors, mut notes) = (BTreeMap::new(), HashMap::new());
        for file in files {
            let TensorFile { metadata, data, .. } = TensorFile::open(&file)?;
            notes.extend(metadata.metadata().clone().unwrap_or_default());
            let mut all: Vec<_> = metadata.tensors().into_iter().collect();
            // A hash map has no order; with sorting, errors always name the same tensor.
            all.sort_by(|(a, _), (b, _)| a.cmp(b));
            for (name, info) in all {
                let refuse = |problem: String| Err(Error::Format { path: file.clone(), problem });
                if !matches!(info.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
                    return refuse(format!("tensor {name} is {:?}: possible are F32, BF16, F16", info.dtype));
                }
                let (dtype, shape, start) = (info.dtype, info.shape.clone(), data + info.data_offsets.0 as u64);
                if tensors.insert(name.clone(), TensorLocation { file: file.clone(), dtype, shape, start }).is_some() {
                    return refuse(format!("tensor {name} is in another file, too"));
                }
            }
        }
        Ok((Self { path: path.to_owned(), tensors }, notes))
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors with their shapes, in the order of their names.
    pub fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.tensors.iter().map(|(name, place)| (name.as_str(), place.shape.as_slice()))
    }

    /// The shape of a tensor.
    ///
    /// # Errors
    /// A tensor that does not exist.
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.of(name)?.shape)
    }

    /// Bytes of a tensor in its file.
    ///
    /// # Errors
    /// A tensor that does not exist.
    pub fn bytes_of(&self, name: &str) -> Result<u64> {
        Ok(self.of(name)?.bytes() as u64)
    }

    /// Bytes that a tensor takes in memory as [`read_stored`](Self::read_stored) returns it.
    ///
    /// # Errors
    /// A tensor that does not exist.
    pub fn stored_bytes(&self, name: &str) -> Result<u64> {
        let place = self.of(name)?;
        Ok(match place.stored_format() {
            Some(_) => place.bytes() as u64,
            None => 4 * place.shape.iter().product::<usize>() as u64,
        })
    }

    /// Checks that the folder has the tensors of these names and shapes, and no others except those that `ignored` names.
    ///
    /// # Errors
    /// The first tensor that is missing, of another shape, or unknown.
    pub fn check(&self, wanted: &BTreeMap<String, Vec<usize>>, ignored: impl Fn(&str) -> bool) -> Result<()> {
        for (name, expected) in wanted {
            match self.tensors.get(name) {
                None => {
                    let problem = format!("tensor {name} {expected:?} is missing, which config.json asks for");
                    return Err(Error::Format { path: self.path.clone(), problem });
                }
                Some(TensorLocation { file, shape, .. }) if shape != expected => {
                    let problem = format!("tensor {name} has shape {shape:?}, but config.json asks for {expected:?}");
                    return Err(Error::Format { path: file.clone(), problem });
                }
                Some(_) => {}
            }
        }
        match self.tensors.iter().find(|(name, _)| !wanted.contains_key(*name) && !ignored(name)) {
            Some((name, TensorLocation { file, shape, .. })) => {
                let problem =
                    format!("tensor {name} {shape:?} belongs to no part of the model that config.json describes");
                Err(Error::Format { path: file.clone(), problem })
            }
            None => Ok(()),
        }
    }

    /// Bytes of all tensors in their files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|place| place.bytes() as u64).sum()
    }

    /// Reads a tensor as f32.
    ///
    /// # Errors
    /// A tensor that does not exist, and failures of the file system.
    pub fn read(&self, name: &str) -> Result<Tensor> {
        let place = self.of(name)?;
        Ok(Tensor::from_vec(place.widened(&place.read()?), place.shape.as_slice(), &Device::Cpu)?)
    }

    /// Reads a tensor as layers compute with it: matrices in bf16 and f16 stay as they are stored, everything else becomes f32.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn read_stored(&self, name: &str) -> Result<Weight> {
        let place = self.of(name)?;
        match (place.stored_format(), &place.shape[..]) {
            (Some(format), &[rows, columns]) => place.matrix(format, rows, columns),
            _ => Ok(self.read(name)?.into()),
        }
    }

    /// Reads some rows of a matrix as f32, `[rows.len(), columns]`; nothing else is read from disk.
    ///
    /// # Errors
    /// As for [`read`](Self::read), a tensor that is no matrix, and rows that it does not have.
    pub fn read_rows(&self, name: &str, rows: &[u32]) -> Result<Tensor> {
        let place = self.of(name)?;
        let &[count, columns] = &place.shape[..] else {
            let problem = format!("tensor {name} has shape {:?}, and is no matrix", place.shape);
            return Err(Error::Format { path: place.file.clone(), problem });
        };
        let size = columns * place.dtype.bitsize() / 8;
        let io = |source| Error::Io { path: place.file.clone(), source };
        let mut file = File::open(&place.file).map_err(io)?;
        let mut bytes = vec![0; rows.len() * size];
        for (row, bytes) in rows.iter().zip(bytes.chunks_exact_mut(size.max(1))) {
            if *row as usize >= count {
                return Err(Error::Input(format!("row {row} of tensor {name}, which has {count}")));
            }
            file.seek(SeekFrom::Start(place.start + u64::from(*row) * size as u64)).map_err(io)?;
            file.read_exact(bytes).map_err(io)?;
        }
        Ok(Tensor::from_vec(place.widened(&bytes), (rows.len(), columns), &Device::Cpu)?)
    }

    fn of(&self, name: &str) -> Result<&TensorLocation> {
        let problem = || format!("there is no tensor {name}");
        self.tensors.get(name).ok_or_else(|| Error::Format { path: self.path.clone(), problem: problem() })
    }
}

impl TensorLocation {
    /// The format of a matrix that stays as it is stored; `None` for what becomes f32.
    fn stored_format(&self) -> Option<Format> {
        match self.dtype {
            Dtype::BF16 if self.shape.len() == 2 => Some(Format::BF16),
            Dtype::F16 if self.shape.len() == 2 => Some(Format::F16),
            _ => None,
        }
    }

    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }

    fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.bytes()];
        let read = |bytes: &mut [u8]| {
            let mut file = File::open(&self.file)?;
            file.seek(SeekFrom::Start(self.start))?;
            file.read_exact(bytes)
        };
        read(&mut bytes).map_err(|source| Error::Io { path: self.file.clone(), source })?;
        Ok(bytes)
    }

    /// Elements in f32.
    fn widened(&self, bytes: &[u8]) -> Vec<f32> {
        let pair = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
        match self.dtype {
            Dtype::BF16 => bytes.chunks_exact(2).map(|b| bf16::from_bits(pair(b)).to_f32()).collect(),
            Dtype::F16 => bytes.chunks_exact(2).map(|b| f16::from_bits(pair(b)).to_f32()).collect(),
            _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        }
    }

    fn matrix(&self, format: Format, rows: usize, columns: usize) -> Result<Weight> {
        Ok(QuantizedMatrix::new(format, rows, columns, self.read()?.into())?.into())
    }
}

/// The paths of the safetensors files of a folder.
fn files(folder: &Path, stem: &str) -> Result<Vec<PathBuf>> {
    let (single, index) =
        (folder.join(format!("{stem}.safetensors")), folder.join(format!("{stem}.safetensors.index.json")));
    if single.is_file() || !index.is_file() {
        return Ok(vec![single]);
    }
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let Index { weight_map } = read_json(&index)?;
    let names: BTreeSet<String> = weight_map.into_values().collect();
    let file = |name: String| {
        // A name with a path in it could lead out of the folder.
        if Path::new(&name).file_name().is_none_or(|plain| plain != name.as_str()) {
            let problem = format!("'{name}' is not a plain file name");
            return Err(Error::Format { path: index.clone(), problem });
        }
        Ok(folder.join(name))
    };
    names.into_iter().map(file).collect()
}

/// Reads a JSON file.
///
/// # Errors
/// A file that cannot be read, or is something else.
pub fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
    let format = |error: serde_json::Error| Error::Format { path: path.to_owned(), problem: error.to_string() };
    serde_json::from_str(&text).map_err(format)
}
