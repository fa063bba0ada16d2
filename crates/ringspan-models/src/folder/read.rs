//! Reads a model's folder: the headers of all files at once, tensors or some of their rows on request.

use super::mxfp4;
use super::names::parts;
use super::stored_parameter::StoredParameter;
use super::{CONFIG, INDEX, SINGLE, parse};
use crate::config::Config;
use crate::decoder::Decoder;
use crate::error::{Error, Result};
use crate::tensor_file::TensorFile;
use candle_core::{Device, Tensor};
use half::{bf16, f16};
use ringspan_candle::Weight;
use ringspan_candle::quantized::{Format, QuantizedMatrix, QuantizedStack};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A model's folder whose tensors are still on disk. Threads may share it, and each read what it needs.
///
/// Files are read by system calls rather than a memory map: if a file shrinks meanwhile, the read fails, while a map would end
/// the process with a signal.
#[derive(Debug)]
pub struct Folder {
    config: Config,
    shapes: BTreeMap<String, Vec<usize>>,
    stored: BTreeMap<String, StoredParameter>,
    /// The parameters that layers can compute with in their stored type.
    matrices: BTreeSet<String>,
}

/// Opens a model's folder: reads its configuration and the headers of its files.
///
/// # Errors
/// Files that are missing or corrupt, and tensors that are missing, unknown or of another shape or type.
pub fn open(folder: &Path) -> Result<Folder> {
    let path = folder.join(CONFIG);
    let config: Config = parse(&path)?;
    let decoder = Decoder::new(config.clone()).map_err(|error| match error {
        Error::Config(problem) => Error::Format { path, problem },
        other => other,
    })?;
    let (shapes, mut stored) = (decoder.shapes(), BTreeMap::new());
    for file in files(folder)? {
        for (name, parameter) in tensors(&file, config.tie_word_embeddings, &shapes)? {
            if stored.insert(name.clone(), parameter).is_some() {
                return Err(Error::Format { path: file, problem: format!("tensor {name} is in another file, too") });
            }
        }
    }
    let stored = mxfp4::joined(stored)?;
    check_shapes(&shapes, stored.iter().map(|(name, stored)| (name, stored.shape.as_slice())))?;
    Ok(Folder { config, shapes, stored, matrices: decoder.stored_matrices() })
}

/// Checks that the tensors found are exactly the parameters of a model.
///
/// # Errors
/// A tensor that is missing, of another shape, or unknown.
fn check_shapes<'a>(
    shapes: &BTreeMap<String, Vec<usize>>,
    found: impl Iterator<Item = (&'a String, &'a [usize])>,
) -> Result<()> {
    let found: BTreeMap<_, _> = found.collect();
    for (name, expected) in shapes {
        match found.get(name) {
            None => return Err(Error::Missing { name: name.clone(), shape: expected.clone() }),
            Some(actual) if actual != expected => {
                let (name, expected, actual) = (name.clone(), expected.clone(), actual.to_vec());
                return Err(Error::Shape { name, expected, actual });
            }
            Some(_) => {}
        }
    }
    match found.iter().find(|(name, _)| !shapes.contains_key(**name)) {
        Some((name, shape)) => Err(Error::Unknown { name: (*name).clone(), shape: shape.to_vec() }),
        None => Ok(()),
    }
}

impl Folder {
    /// The model's sizes and switches.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// All parameters with their shapes.
    pub fn shapes(&self) -> &BTreeMap<String, Vec<usize>> {
        &self.shapes
    }

    /// Reads rows `rows` of a parameter's first dimension, as f32. Nothing else is read from disk.
    ///
    /// # Errors
    /// A parameter or rows that do not exist, and failures of the file system.
    pub fn read(&self, name: &str, rows: Range<usize>) -> Result<Tensor> {
        let StoredParameter { file, dtype, start, shape, exponents } = self.of(name)?;
        let mut part = shape.clone();
        let Some(first) = part.first_mut().filter(|first| rows.start <= rows.end && rows.end <= **first) else {
            return Err(Error::Rows { name: name.to_owned(), rows, shape: shape.clone() });
        };
        *first = rows.len();
        if let (Some(_), &[_, _, outputs]) = (exponents, &shape[..]) {
            let all = self.read_matrix(name, rows.start * outputs..rows.end * outputs)?;
            return Ok(QuantizedStack::new(all, outputs)?.dequantize(0..rows.len())?);
        }
        let width: usize = shape[1..].iter().product();
        let at = start + (rows.start * width * size(*dtype)) as u64;
        let io = |source| Error::Io { path: file.clone(), source };
        let mut reader = File::open(file).map_err(io)?;
        reader.seek(SeekFrom::Start(at)).map_err(io)?;
        let values = values(&mut reader, *dtype, rows.len() * width).map_err(io)?;
        Ok(Tensor::from_vec(values, part, &Device::Cpu)?)
    }
}

impl Folder {
    /// Reads a parameter as layers compute with it: matrices in bf16, f16 and MXFP4 stay as stored, everything else becomes
    /// f32.
    ///
    /// # Errors
    /// A parameter that does not exist, and failures of the file system.
    pub fn read_stored(&self, name: &str) -> Result<Weight> {
        let shape = &self.of(name)?.shape;
        match (self.format(name), &shape[..]) {
            (Some(_), &[rows, _]) => Ok(self.read_matrix(name, 0..rows)?.into()),
            (Some(_), &[experts, _, outputs]) => {
                Ok(QuantizedStack::new(self.read_matrix(name, 0..experts * outputs)?, outputs)?.into())
            }
            _ => Ok(self.read(name, 0..shape.first().copied().unwrap_or(0))?.into()),
        }
    }

    /// The stored format of a matrix, or of the matrices of a layer's experts, if layers can compute with it as it is; `None`
    /// for other parameters.
    pub fn format(&self, name: &str) -> Option<Format> {
        let stored = self.stored.get(name).filter(|stored| {
            self.matrices.contains(name) && (2..=3).contains(&stored.shape.len()) && !stored.shape.contains(&0)
        })?;
        match (stored.dtype, &stored.exponents) {
            (Dtype::U8, Some(_)) => Some(Format::Mxfp4),
            (Dtype::BF16, _) => Some(Format::BF16),
            (Dtype::F16, _) => Some(Format::F16),
            _ => None,
        }
    }

    /// Reads some rows of a matrix that has a [`format`](Self::format); of a tensor `[e, in, out]` of experts, rows of their
    /// matrices `[out, in]`, stacked one below the other. Nothing else is read, except that bf16 and f16 tensors of experts are
    /// read by whole experts.
    ///
    /// # Errors
    /// A parameter that has no such format, rows that do not exist, and failures of the file system.
    pub fn read_matrix(&self, name: &str, rows: Range<usize>) -> Result<QuantizedMatrix> {
        let stored @ StoredParameter { file, start, shape, exponents, .. } = self.of(name)?;
        let unknown = || Error::Unknown { name: name.to_owned(), shape: shape.clone() };
        let format = self.format(name).ok_or_else(unknown)?;
        let (all, columns, outputs) = match shape[..] {
            [outputs, inputs] => (outputs, inputs, outputs),
            [experts, inputs, outputs] => (experts * outputs, inputs, outputs),
            _ => return Err(unknown()),
        };
        if rows.start > rows.end || rows.end > all {
            return Err(Error::Rows { name: name.to_owned(), rows, shape: shape.clone() });
        }
        if let Some(exponents) = exponents {
            return mxfp4::rows(stored, exponents, rows);
        }
        let io = |source| Error::Io { path: file.clone(), source };
        let mut reader = File::open(file).map_err(io)?;
        let mut seek = |row: usize| {
            let at = start + format.bytes(row, columns)? as u64;
            reader.seek(SeekFrom::Start(at)).map(drop).map_err(io)
        };
        if shape.len() == 2 {
            seek(rows.start)?;
            let mut bytes = vec![0; format.bytes(rows.len(), columns)?];
            reader.read_exact(&mut bytes).map_err(io)?;
            return Ok(QuantizedMatrix::new(format, rows.len(), columns, bytes.into())?);
        }
        // Matrices that have to be transposed are read whole.
        let (first, end) = (rows.start / outputs, rows.end.div_ceil(outputs));
        seek(first * outputs)?;
        let turned = QuantizedStack::from_tensor(format, [end - first, columns, outputs], |bytes| {
            reader.read_exact(bytes).map_err(io)
        })?;
        Ok(turned.matrix().rows(rows.start - first * outputs..rows.end - first * outputs)?)
    }

    fn of(&self, name: &str) -> Result<&StoredParameter> {
        self.stored.get(name).ok_or_else(|| Error::Unknown { name: name.to_owned(), shape: Vec::new() })
    }
}

/// Bytes of an element. Types that cannot be read have been refused when the folder was opened.
fn size(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

/// Reads `count` elements, and widens them to f32.
fn values(reader: &mut impl Read, dtype: Dtype, count: usize) -> std::io::Result<Vec<f32>> {
    let mut values = Vec::with_capacity(count);
    // Bytes are read piece by piece, so that memory never holds the whole narrow tensor and its f32 copy.
    let mut bytes = vec![0; (count * size(dtype)).min(1 << 20)];
    let mut left = count * size(dtype);
    while left > 0 {
        let piece = &mut bytes[..left.min(1 << 20)];
        reader.read_exact(piece)?;
        let pair = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
        match dtype {
            Dtype::BF16 => values.extend(piece.chunks_exact(2).map(|b| bf16::from_bits(pair(b)).to_f32())),
            Dtype::F16 => values.extend(piece.chunks_exact(2).map(|b| f16::from_bits(pair(b)).to_f32())),
            _ => values.extend(piece.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        }
        left -= piece.len();
    }
    Ok(values)
}

/// The paths of the safetensors files of a folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let index = folder.join(INDEX);
    if folder.join(SINGLE).is_file() || !index.is_file() {
        return Ok(vec![folder.join(SINGLE)]);
    }
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let Index { weight_map } = parse(&index)?;
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

/// The parameters that a file's header lists.
fn tensors(path: &Path, tied: bool, known: &BTreeMap<String, Vec<usize>>) -> Result<Vec<(String, StoredParameter)>> {
    let format = |problem: String| Error::Format { path: path.to_owned(), problem };
    let TensorFile { metadata, data, .. } = TensorFile::open(path)?;
    let mut all = Vec::new();
    for (name, TensorInfo { dtype, shape, data_offsets }) in metadata.tensors() {
        for part in parts(&name, shape, tied, known) {
            if !matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) && !mxfp4::is_part(&name, *dtype) {
                return Err(format(format!("tensor {name} is {dtype:?}: possible are F32, BF16, F16")));
            }
            let start = data + (data_offsets.0 + part.start * size(*dtype)) as u64;
            all.push((
                part.name,
                StoredParameter { file: path.to_owned(), dtype: *dtype, start, shape: part.shape, exponents: None },
            ));
        }
    }
    // A hash map has no order; with sorting, errors always name the same tensor.
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(all)
}
