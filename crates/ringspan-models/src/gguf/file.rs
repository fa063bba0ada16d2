//! A GGUF file: its metadata, and the offsets of its tensors.
//!
//! The format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. Candle's own reader refuses a whole file for one
//! tensor of a type that it does not know.

use crate::error::{Error, Result};
use bytes::Bytes;
use candle_core::quantized::gguf_file::{Content, Value, VersionedMagic};
use candle_core::quantized::{GgmlDType, ggml_file::qtensor_from_ggml};
use candle_core::{Device, Tensor};
use ringspan_candle::Weight;
use ringspan_candle::quantized::{Format, QuantizedMatrix};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A GGUF file with its parsed header; its tensors are read when they are asked for.
pub(super) struct GgufFile {
    path: PathBuf,
    pub(super) metadata: HashMap<String, Value>,
    tensors: BTreeMap<String, TensorInfo>,
    /// Bytes of the file.
    length: u64,
    /// Offset in the file from which the tensors' offsets count.
    data: u64,
}

/// Shape, type and offset of a tensor.
#[derive(Debug, Clone)]
struct TensorInfo {
    /// Sizes of the dimensions, outermost first; the file lists the innermost first.
    shape: Vec<usize>,
    /// The number of its ggml type.
    kind: u32,
    offset: u64,
}

/// The types that are decoded when they are read, because no matrix product can compute with them as they are stored.
const DECODED: [(u32, GgmlDType); 7] = [
    (0, GgmlDType::F32),
    (3, GgmlDType::Q4_1),
    (7, GgmlDType::Q5_1),
    (9, GgmlDType::Q8_1),
    (10, GgmlDType::Q2K),
    (11, GgmlDType::Q3K),
    (15, GgmlDType::Q8K),
];

/// Upper limit on the dimensions of a tensor: the 4 of ggml, and the 5 of a convolution over frames, rows and columns, which files of
/// video models have.
const MOST_DIMS: u32 = 5;
/// Upper limit on the depth of nested arrays; deeper ones are taken for a broken file.
const MOST_NESTED: usize = 4;

impl std::fmt::Debug for GgufFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GgufFile").field("path", &self.path).finish_non_exhaustive()
    }
}

impl GgufFile {
    /// Opens a file, and reads its metadata and the list of its tensors.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let mut header = Header { reader: BufReader::new(file), at: 0, length };
        let (metadata, tensors) = header.read().map_err(|problem| broken(path, &problem))?;
        let alignment = match metadata.get("general.alignment").map(Value::to_u32) {
            None => 32,
            Some(Ok(alignment)) if alignment > 0 => u64::from(alignment),
            Some(_) => return Err(broken(path, &"general.alignment is no number above 0")),
        };
        let data = header.at.next_multiple_of(alignment);
        Ok(Self { path: path.to_owned(), metadata, tensors, length, data })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes an error that names the file.
    pub(super) fn broken(&self, problem: &impl ToString) -> Error {
        broken(&self.path, problem)
    }

    /// The names of the tensors, in alphabetical order.
    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.tensors.keys()
    }

    /// The shape of a tensor, if the file has it.
    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|tensor| tensor.shape.as_slice())
    }

    /// The metadata in candle's type, from which candle builds a tokenizer.
    pub(super) fn into_metadata(self) -> Content {
        let Self { metadata, data, .. } = self;
        Content { magic: VersionedMagic::GgufV3, metadata, tensor_infos: HashMap::new(), tensor_data_offset: data }
    }

    /// Reads a tensor as rows of its last dimension, `[product of the other dimensions, last]`: as it is stored if matrix
    /// products can compute with its type, else in f32.
    pub(super) fn matrix(&self, name: &str) -> Result<Weight> {
        let shape = self.info(name)?.shape;
        self.rows(name, 0..shape[..shape.len().saturating_sub(1)].iter().product())
    }

    /// Reads some of these rows, which must be there; nothing else is read.
    pub(super) fn rows(&self, name: &str, rows: Range<usize>) -> Result<Weight> {
        let TensorInfo { shape, kind, offset } = self.info(name)?;
        let columns = shape.last().copied().unwrap_or(1);
        let before = self.bytes_in_file(name, kind, rows.start, columns)?;
        let count = self.bytes_in_file(name, kind, rows.len(), columns)?;
        let bytes = self.bytes(name, offset.saturating_add(before as u64), count)?;
        if let Some(format) = Format::from_ggml(kind) {
            return QuantizedMatrix::new(format, rows.len(), columns, bytes)
                .map(Weight::Quantized)
                .map_err(|error| self.broken(&format!("tensor {name}: {error}")));
        }
        qtensor_from_ggml(self.decoded(name, kind)?, &bytes, vec![rows.len(), columns], &Device::Cpu)
            .and_then(|tensor| tensor.dequantize(&Device::Cpu))
            .map(Weight::Dense)
            .map_err(|error| self.broken(&format!("tensor {name}: {error}")))
    }

    /// Bytes of some rows of a tensor in the file.
    fn bytes_in_file(&self, name: &str, kind: u32, rows: usize, columns: usize) -> Result<usize> {
        if let Some(format) = Format::from_ggml(kind) {
            return format.bytes(rows, columns).map_err(|error| self.broken(&format!("tensor {name}: {error}")));
        }
        let known = self.decoded(name, kind)?;
        if !columns.is_multiple_of(known.block_size()) {
            let problem = format!("tensor {name}: rows of {columns} are not whole blocks of {}", known.block_size());
            return Err(self.broken(&problem));
        }
        let bytes =
            rows.checked_mul(columns / known.block_size()).and_then(|blocks| blocks.checked_mul(known.type_size()));
        bytes.ok_or_else(|| {
            self.broken(&format!("tensor {name} of {rows} x {columns} takes more bytes than can be counted"))
        })
    }

    /// The type of a tensor that is decoded when it is read.
    fn decoded(&self, name: &str, kind: u32) -> Result<GgmlDType> {
        let known = DECODED.into_iter().find(|(number, _)| *number == kind);
        known.map(|(_, known)| known).ok_or_else(|| {
            let formats = Format::ALL.map(|format| format.to_string()).into_iter();
            let all: Vec<String> = formats.chain(DECODED.map(|(_, known)| format!("{known:?}"))).collect();
            self.broken(&format!("tensor {name} is of type {kind}, which is unknown: possible are {}", all.join(", ")))
        })
    }

    /// Bytes that a tensor takes in memory, where matrices stay as they are stored.
    ///
    /// # Errors
    /// The tensor is not there, its type is unknown, or the file ends before it does.
    pub(super) fn stored_bytes(&self, name: &str) -> Result<u64> {
        let TensorInfo { shape, kind, offset } = self.info(name)?;
        let (columns, rows) = shape.split_last().map_or((1, 1), |(columns, rows)| (*columns, rows.iter().product()));
        let bytes = self.bytes_in_file(name, kind, rows, columns)? as u64;
        self.start(name, offset, bytes)?;
        match (Format::from_ggml(kind), shape.len()) {
            (Some(_), 2) => Ok(bytes),
            _ => Ok(4 * shape.iter().map(|size| *size as u64).product::<u64>()),
        }
    }

    /// The position in the file of so many bytes of a tensor, which must be there.
    fn start(&self, name: &str, offset: u64, count: u64) -> Result<u64> {
        let start = self.data.checked_add(offset);
        start.filter(|start| start.checked_add(count).is_some_and(|end| end <= self.length)).ok_or_else(|| {
            self.broken(&format!("not a whole GGUF file: tensor {name} ends after its {} bytes", self.length))
        })
    }

    /// Reads a tensor in f32 and in its stored shape.
    pub(super) fn tensor(&self, name: &str) -> Result<Tensor> {
        let shape = self.info(name)?.shape;
        let tensor = self.matrix(name)?.to_tensor().and_then(|tensor| tensor.reshape(shape));
        tensor.map_err(|error| self.broken(&format!("tensor {name}: {error}")))
    }

    fn info(&self, name: &str) -> Result<TensorInfo> {
        self.tensors.get(name).cloned().ok_or_else(|| self.broken(&format!("tensor {name} is missing")))
    }

    fn bytes(&self, name: &str, offset: u64, count: usize) -> Result<Bytes> {
        let io = |source| Error::Io { path: self.path.clone(), source };
        // Each call has a position in the file of its own, since ranks read at the same time.
        let mut file = File::open(&self.path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        if length != self.length {
            return Err(self.broken(&format!("it had {} bytes when it was opened, and has {length} now", self.length)));
        }
        let start = self.start(name, offset, count as u64)?;
        let mut bytes = vec![0; count];
        file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(&mut bytes)).map_err(io)?;
        Ok(bytes.into())
    }
}

fn broken(path: &Path, problem: &impl ToString) -> Error {
    Error::Format { path: path.to_owned(), problem: problem.to_string() }
}

/// The parser of the part of the file before the tensors.
struct Header {
    reader: BufReader<File>,
    at: u64,
    length: u64,
}

/// A value parsed from the header, or a description of what is wrong with it.
type HeaderResult<T> = std::result::Result<T, String>;

impl Header {
    fn read(&mut self) -> HeaderResult<(HashMap<String, Value>, BTreeMap<String, TensorInfo>)> {
        if &self.bytes::<4>()? != b"GGUF" {
            return Err("not a GGUF file: it does not begin with GGUF".into());
        }
        let version = self.u32()?;
        if !(2..=3).contains(&version) {
            return Err(format!("GGUF version {version} is unknown: possible are 2, 3, little-endian"));
        }
        let (tensors, entries) = (self.count(24)?, self.count(12)?);
        let mut metadata = HashMap::new();
        let mut infos = BTreeMap::new();
        // The header has the number of tensors first, but the list of metadata before the list of tensors.
        for _ in 0..entries {
            let key = self.text()?;
            let kind = self.u32()?;
            let value = self.value(kind, 0).map_err(|problem| format!("{key}: {problem}"))?;
            metadata.insert(key, value);
        }
        for _ in 0..tensors {
            let name = self.text()?;
            let info = self.info().map_err(|problem| format!("tensor {name}: {problem}"))?;
            if infos.insert(name.clone(), info).is_some() {
                return Err(format!("tensor {name} is there twice"));
            }
        }
        Ok((metadata, infos))
    }

    fn info(&mut self) -> HeaderResult<TensorInfo> {
        let dims = self.u32()?;
        if !(1..=MOST_DIMS).contains(&dims) {
            return Err(format!("{dims} dimensions: possible are 1 to {MOST_DIMS}"));
        }
        let mut shape = (0..dims).map(|_| self.size()).collect::<HeaderResult<Vec<usize>>>()?;
        shape.reverse();
        let elements = shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size));
        // No type packs more than eight elements into a byte. A shape that the file cannot hold, or that has many experts but
        // no elements, would make the program allocate as much memory as it claims.
        if elements.is_none_or(|elements| elements == 0 || elements as u64 / 8 > self.length) {
            return Err(format!("a shape of {shape:?} in a file of {} bytes", self.length));
        }
        Ok(TensorInfo { shape, kind: self.u32()?, offset: self.u64()? })
    }

    fn value(&mut self, kind: u32, depth: usize) -> HeaderResult<Value> {
        Ok(match kind {
            0 => Value::U8(u8::from_le_bytes(self.bytes()?)),
            1 => Value::I8(i8::from_le_bytes(self.bytes()?)),
            2 => Value::U16(u16::from_le_bytes(self.bytes()?)),
            3 => Value::I16(i16::from_le_bytes(self.bytes()?)),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(i32::from_le_bytes(self.bytes()?)),
            6 => Value::F32(f32::from_le_bytes(self.bytes()?)),
            7 => Value::Bool(self.bytes::<1>()? != [0]),
            8 => Value::String(self.text()?),
            9 if depth < MOST_NESTED => {
                let kind = self.u32()?;
                let count = self.count(1)?;
                Value::Array((0..count).map(|_| self.value(kind, depth + 1)).collect::<HeaderResult<_>>()?)
            }
            10 => Value::U64(self.u64()?),
            11 => Value::I64(i64::from_le_bytes(self.bytes()?)),
            12 => Value::F64(f64::from_le_bytes(self.bytes()?)),
            other => return Err(format!("a value of type {other} is unknown")),
        })
    }

    fn bytes<const N: usize>(&mut self) -> HeaderResult<[u8; N]> {
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes).map_err(|error| format!("not a whole GGUF file: {error}"))?;
        self.at += N as u64;
        Ok(bytes)
    }

    fn u32(&mut self) -> HeaderResult<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> HeaderResult<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn size(&mut self) -> HeaderResult<usize> {
        let size = self.u64()?;
        usize::try_from(size).map_err(|_| format!("a size of {size}"))
    }

    /// Reads the number of entries that follow, each of at least `least` bytes. A broken file must not make the program
    /// allocate more memory than the file is long.
    fn count(&mut self, least: u64) -> HeaderResult<usize> {
        let count = self.size()?;
        match (count as u64).checked_mul(least) {
            Some(bytes) if bytes <= self.length - self.at.min(self.length) => Ok(count),
            _ => Err(format!("not a whole GGUF file: {count} entries in {} bytes", self.length)),
        }
    }

    fn text(&mut self) -> HeaderResult<String> {
        let count = self.count(1)?;
        let mut text = vec![0; count];
        self.reader.read_exact(&mut text).map_err(|error| format!("not a whole GGUF file: {error}"))?;
        self.at += count as u64;
        // Tokens of some models are not valid UTF-8.
        Ok(String::from_utf8(text).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }
}
