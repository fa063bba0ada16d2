//! Slices of f32 tensors in safetensors files: written by many ranks, read by any number of others.
//!
//! A file is a safetensors file of one-dimensional tensors. Each is a slice of a tensor seen as a row of numbers, and the
//! file's metadata says for each name where in that row it begins.

use super::storage::Storage;
use crate::error::{Error, Result};
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufWriter, Read, Seek, SeekFrom, Write},
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

/// Numbers that somebody else may hold, too.
pub type Numbers = Arc<dyn AsRef<[f32]> + Send + Sync>;

/// A slice of a tensor.
#[derive(Clone)]
pub struct Slice {
    /// The tensor.
    pub name: String,
    /// Where the slice begins in the tensor.
    pub start: usize,
    /// Its numbers.
    pub values: Numbers,
}

/// Writes slices to a file, one at a time: saving needs no second copy of a model.
pub(crate) fn write(storage: &dyn Storage, path: &Path, slices: &[Slice]) -> Result<()> {
    let mut header = serde_json::Map::new();
    let starts: BTreeMap<&str, String> = slices.iter().map(|slice| (&*slice.name, slice.start.to_string())).collect();
    header.insert("__metadata__".into(), serde_json::json!(starts));
    let mut end = 0;
    for Slice { name, values, .. } in slices {
        let (start, len) = (end, (**values).as_ref().len());
        end += len * 4;
        header.insert(name.clone(), serde_json::json!({"dtype": "F32", "shape": [len], "data_offsets": [start, end]}));
    }
    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    // The format wants the data aligned to 8 bytes and allows spaces behind the header.
    header.resize(header.len().next_multiple_of(8), b' ');

    let failed = || Error::io("write", path);
    let mut out = BufWriter::with_capacity(1 << 20, storage.create(path).map_err(failed())?);
    out.write_all(&(header.len() as u64).to_le_bytes()).and_then(|()| out.write_all(&header)).map_err(failed())?;
    for slice in slices {
        out.write_all(bytemuck::cast_slice((*slice.values).as_ref())).map_err(failed())?;
    }
    // By hand rather than by drop: an error here is the last chance to hear of a full disk.
    out.flush().map_err(failed())?;
    out.get_mut().sync().map_err(failed())
}

/// Tensors whose slices lie in files. Nothing but the headers is read before it is asked for.
#[derive(Debug)]
pub struct Tensors {
    files: Vec<(PathBuf, Mutex<File>)>,
    /// By tensor, rising by the first element.
    places: BTreeMap<String, Vec<Place>>,
}

#[derive(Debug)]
struct Place {
    elements: Range<usize>,
    file: usize,
    /// Byte in the file.
    at: u64,
}

/// What a header says of a tensor.
#[derive(Deserialize)]
struct Info {
    dtype: String,
    data_offsets: (u64, u64),
}

impl Tensors {
    /// Opens files.
    pub(crate) fn open(paths: Vec<PathBuf>) -> Result<Self> {
        let mut tensors = Self { files: Vec::new(), places: BTreeMap::new() };
        for path in paths {
            tensors.add(path)?;
        }
        for places in tensors.places.values_mut() {
            places.sort_by_key(|place| place.elements.start);
        }
        Ok(tensors)
    }

    fn add(&mut self, path: PathBuf) -> Result<()> {
        let damaged = |problem: &str| Error::Checkpoint { path: path.clone(), problem: format!("damaged: {problem}") };
        let read = |e| Error::io("read", &path)(e);
        let mut file = File::open(&path).map_err(read)?;
        let size = file.metadata().map_err(read)?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(read)?;
        let header = u64::from_le_bytes(length);
        if header > size.saturating_sub(8) {
            return Err(damaged(&format!("a header of {header} bytes in a file of {size}")));
        }
        let mut text = Vec::new();
        (&mut file).take(header).read_to_end(&mut text).map_err(read)?;
        let mut header_of: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&text).map_err(|e| damaged(&e.to_string()))?;
        let starts: BTreeMap<String, String> = match header_of.remove("__metadata__") {
            Some(starts) => serde_json::from_value(starts).map_err(|e| damaged(&e.to_string()))?,
            None => BTreeMap::new(),
        };
        for (name, info) in header_of {
            let Info { dtype, data_offsets: (from, to) } =
                serde_json::from_value(info).map_err(|e| damaged(&format!("`{name}`: {e}")))?;
            let at = 8 + header;
            if dtype != "F32" || from > to || (to - from) % 4 != 0 || to > size - at {
                return Err(damaged(&format!("`{name}` is {dtype} in bytes {from} to {to} of a file of {size}")));
            }
            let start = starts.get(&name).and_then(|start| start.parse::<usize>().ok());
            let end = start.and_then(|start| start.checked_add(((to - from) / 4) as usize));
            let (Some(start), Some(end)) = (start, end) else {
                return Err(damaged(&format!("it does not say where its slice of `{name}` begins")));
            };
            let place = Place { elements: start..end, file: self.files.len(), at: at + from };
            self.places.entry(name).or_default().push(place);
        }
        self.files.push((path, Mutex::new(file)));
        Ok(())
    }

    /// Names of the tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// Elements of a tensor, if there is a slice of it.
    pub fn len(&self, name: &str) -> Option<usize> {
        self.places.get(name)?.last().map(|place| place.elements.end)
    }

    /// Some elements of a tensor.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if the slices do not hold them all.
    pub fn read(&self, name: &str, elements: Range<usize>) -> Result<Vec<f32>> {
        let mut values = Vec::with_capacity(elements.len());
        for place in self.places.get(name).into_iter().flatten() {
            let next = elements.start + values.len();
            let common = next.max(place.elements.start)..elements.end.min(place.elements.end);
            if common.start != next || common.is_empty() {
                continue;
            }
            let (path, file) = &self.files[place.file];
            let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
            let mut bytes = vec![0; 4 * common.len()];
            file.seek(SeekFrom::Start(place.at + 4 * (common.start - place.elements.start) as u64))
                .and_then(|_| file.read_exact(&mut bytes))
                .map_err(Error::io("read", path))?;
            values.extend(bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned::<f32>));
        }
        if values.len() == elements.len() {
            return Ok(values);
        }
        let problem = format!("element {} of `{name}` is in none of its files", elements.start + values.len());
        let path = self.files.first().and_then(|(path, _)| path.parent()).unwrap_or(Path::new("")).to_path_buf();
        Err(Error::Checkpoint { path, problem })
    }
}
