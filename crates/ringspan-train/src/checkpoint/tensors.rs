//! Slices of f32 tensors in safetensors files: written by many ranks, read by any number of others.
//!
//! A file is a safetensors file of one-dimensional tensors. Each is a slice of a tensor, or of some of its columns, flattened row
//! by row; the file's metadata says for each name at which of these elements the slice begins, and which columns it is of.

use super::storage::Storage;
use crate::error::{Error, Result};
use ringspan_models::TensorFile;
use safetensors::{Dtype, tensor::TensorInfo};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufWriter, Read, Seek, SeekFrom, Write},
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

/// Numbers that may be shared with other owners.
pub type SharedValues = Arc<dyn AsRef<[f32]> + Send + Sync>;

/// A slice of a tensor.
#[derive(Clone)]
pub struct Slice {
    /// Name of the tensor.
    pub name: String,
    /// The columns of the tensor from which the slice is cut; none for all.
    pub columns: Option<Columns>,
    /// Index of the slice's first element among the elements of these columns, row by row.
    pub start: usize,
    /// The elements of the slice.
    pub values: SharedValues,
}

/// Some columns of a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Columns {
    /// Indices of the columns.
    pub range: Range<usize>,
    /// Number of columns of the matrix.
    pub of: usize,
}

/// A range of a tensor's elements, or of the elements of some of its columns, row by row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// The columns; none for all.
    pub columns: Option<Columns>,
    /// Range among the elements of these columns.
    pub elements: Range<usize>,
}

impl Region {
    /// A range of a tensor's elements.
    pub fn elements(elements: Range<usize>) -> Self {
        Self { columns: None, elements }
    }

    /// The intersection with another region of the same tensor, as ranges: start in this region, start in the other, length.
    fn common(&self, other: &Self) -> Vec<(usize, usize, usize)> {
        let (a, b) = (&self.elements, &other.elements);
        let of = self.columns.as_ref().or(other.columns.as_ref()).map(|columns| columns.of);
        let (Some(of), false) = (of, self.columns == other.columns) else {
            let (start, end) = (a.start.max(b.start), a.end.min(b.end));
            return if start < end { vec![(start - a.start, start - b.start, end - start)] } else { Vec::new() };
        };
        let whole = Columns { range: 0..of, of };
        let (in_a, in_b) = (self.columns.as_ref().unwrap_or(&whole), other.columns.as_ref().unwrap_or(&whole));
        let (rows_a, rows_b) = (in_a.rows(a), in_b.rows(b));
        let row = |row: usize| {
            let (from_a, from_b) = (in_a.of_row(row, a), in_b.of_row(row, b));
            let (start, end) = (from_a.start.max(from_b.start), from_a.end.min(from_b.end));
            let index = |columns: &Columns, elements: &Range<usize>| {
                row * columns.range.len() + start - columns.range.start - elements.start
            };
            (start < end).then(|| (index(in_a, a), index(in_b, b), end - start))
        };
        (rows_a.start.max(rows_b.start)..rows_a.end.min(rows_b.end)).filter_map(row).collect()
    }

    /// One past the last element, as an index into the whole tensor.
    fn end(&self) -> usize {
        match &self.columns {
            Some(columns) if !self.elements.is_empty() => {
                let (last, wide) = (self.elements.end - 1, columns.range.len().max(1));
                (last / wide).saturating_mul(columns.of).saturating_add(columns.range.start + last % wide + 1)
            }
            _ => self.elements.end,
        }
    }

    /// The columns and the first element of a slice, as a file's metadata spells them.
    fn words(columns: Option<&Columns>, start: usize) -> String {
        match columns {
            Some(Columns { range, of }) => format!("{start} in columns {}..{} of {of}", range.start, range.end),
            None => start.to_string(),
        }
    }

    /// A region of `len` elements, from the words of a file's metadata.
    fn parse(words: &str, len: usize) -> Option<Self> {
        let (start, columns) = match words.split_once(" in columns ") {
            Some((start, columns)) => {
                let (range, of) = columns.split_once(" of ")?;
                let (from, to) = range.split_once("..")?;
                let (from, to, of) = (from.parse().ok()?, to.parse().ok()?, of.parse().ok()?);
                let within = from < to && to <= of;
                (start, Some(within.then_some(Columns { range: from..to, of })?))
            }
            None => (words, None),
        };
        let start: usize = start.parse().ok()?;
        Some(Self { columns, elements: start..start.checked_add(len)? })
    }
}

impl Columns {
    /// The rows that a range of these columns' elements lies in.
    fn rows(&self, elements: &Range<usize>) -> Range<usize> {
        let wide = self.range.len().max(1);
        elements.start / wide..elements.end.div_ceil(wide)
    }

    /// The columns of a row that lie in a range of these columns' elements.
    fn of_row(&self, row: usize, elements: &Range<usize>) -> Range<usize> {
        let wide = self.range.len();
        let column = |element: usize| self.range.start + element.saturating_sub(row * wide).min(wide);
        column(elements.start)..column(elements.end)
    }
}

/// Separates the name of a tensor from the number of the slice, where a file has several slices of the tensor.
const NUMBER: char = '#';

/// The names of slices in a file: the names of their tensors, with a number from the second slice of a tensor on.
fn keys(slices: &[Slice]) -> Vec<String> {
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    let key = |slice: &'_ Slice, before: usize| match before {
        0 => slice.name.clone(),
        _ => format!("{}{NUMBER}{before}", slice.name),
    };
    slices
        .iter()
        .map(|slice| {
            let count = seen.entry(&slice.name).or_default();
            *count += 1;
            key(slice, *count - 1)
        })
        .collect()
}

/// Writes slices to a file, one at a time: saving needs no second copy of a model.
pub(crate) fn write(storage: &dyn Storage, path: &Path, slices: &[Slice]) -> Result<()> {
    let mut header = serde_json::Map::new();
    let begins = |slice: &'_ Slice| Region::words(slice.columns.as_ref(), slice.start);
    let keys = keys(slices);
    let starts: BTreeMap<&str, String> = keys.iter().map(String::as_str).zip(slices.iter().map(begins)).collect();
    header.insert("__metadata__".into(), serde_json::json!(starts));
    let mut end = 0;
    for (key, Slice { values, .. }) in keys.iter().zip(slices) {
        let (start, len) = (end, (**values).as_ref().len());
        end += len * 4;
        header.insert(key.clone(), serde_json::json!({"dtype": "F32", "shape": [len], "data_offsets": [start, end]}));
    }
    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    // The format requires the data to be aligned to 8 bytes and allows spaces after the header.
    header.resize(header.len().next_multiple_of(8), b' ');
    // This is checked before a byte is written: a checkpoint that cannot be read back would be trusted until it is needed.
    if let Some(problem) = TensorFile::refused(header.len()) {
        return Err(Error::Checkpoint { path: path.to_path_buf(), problem });
    }

    let failed = || Error::io("write", path);
    let mut out = BufWriter::with_capacity(1 << 20, storage.create(path).map_err(failed())?);
    out.write_all(&(header.len() as u64).to_le_bytes()).and_then(|()| out.write_all(&header)).map_err(failed())?;
    for slice in slices {
        out.write_all(bytemuck::cast_slice((*slice.values).as_ref())).map_err(failed())?;
    }
    // Flushed by hand rather than by drop: an error here is the last chance to hear of a full disk.
    out.flush().map_err(failed())?;
    out.get_mut().sync().map_err(failed())
}

/// Tensors whose slices lie in files. Opening reads only the headers; elements are read when they are asked for.
#[derive(Debug)]
pub struct Tensors {
    files: Vec<(PathBuf, Mutex<File>)>,
    slices: BTreeMap<String, Vec<StoredSlice>>,
}

/// A slice in a file.
#[derive(Debug)]
struct StoredSlice {
    region: Region,
    file: usize,
    /// Offset of the slice in the file, in bytes.
    at: u64,
}

impl Tensors {
    /// Opens the files and reads their headers.
    pub(crate) fn open(paths: Vec<PathBuf>) -> Result<Self> {
        let mut tensors = Self { files: Vec::new(), slices: BTreeMap::new() };
        for path in paths {
            tensors.add(path)?;
        }
        Ok(tensors)
    }

    fn add(&mut self, path: PathBuf) -> Result<()> {
        let damaged = |problem: &str| Error::Checkpoint { path: path.clone(), problem: format!("damaged: {problem}") };
        let opened = TensorFile::open(&path).map_err(|error| match error {
            ringspan_models::Error::Io { source, .. } => Error::io("read", &path)(source),
            ringspan_models::Error::Format { problem, .. } => damaged(&problem),
            other => damaged(&other.to_string()),
        });
        let TensorFile { file, metadata, data } = opened?;
        let starts = metadata.metadata().clone().unwrap_or_default();
        for (name, TensorInfo { dtype, data_offsets: (from, to), .. }) in metadata.tensors() {
            if *dtype != Dtype::F32 {
                return Err(damaged(&format!("`{name}` is {dtype}")));
            }
            let len = (to - from) / 4;
            let Some(region) = starts.get(&name).and_then(|words| Region::parse(words, len)) else {
                return Err(damaged(&format!("it does not say where its slice of `{name}` begins")));
            };
            let stored = StoredSlice { region, file: self.files.len(), at: data + *from as u64 };
            let tensor = name.split(NUMBER).next().unwrap_or_default().to_owned();
            self.slices.entry(tensor).or_default().push(stored);
        }
        self.files.push((path, Mutex::new(file)));
        Ok(())
    }

    /// Names of the tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.slices.keys().map(String::as_str)
    }

    /// Number of elements of a tensor, if the files hold a slice of it.
    pub fn len(&self, name: &str) -> Option<usize> {
        self.slices.get(name)?.iter().map(|stored| stored.region.end()).max()
    }

    /// The elements of a region of a tensor.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if the slices do not hold them all.
    pub fn read(&self, name: &str, region: &Region) -> Result<Vec<f32>> {
        let mut values = vec![0.0f32; region.elements.len()];
        let mut found = vec![false; values.len()];
        for stored in self.slices.get(name).into_iter().flatten() {
            let common = region.common(&stored.region);
            let (Some((_, first, _)), Some((_, last, len))) = (common.first(), common.last()) else { continue };
            let (path, file) = &self.files[stored.file];
            let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
            // All are read in one go, with the elements that lie between.
            let mut bytes = vec![0; 4 * (last + len - first)];
            file.seek(SeekFrom::Start(stored.at + 4 * *first as u64))
                .and_then(|_| file.read_exact(&mut bytes))
                .map_err(Error::io("read", path))?;
            for (to, from, len) in &common {
                let bytes = bytes[4 * (from - first)..][..4 * len].chunks_exact(4);
                values[*to..to + len].iter_mut().zip(bytes).for_each(|(x, b)| *x = bytemuck::pod_read_unaligned(b));
                found[*to..to + len].fill(true);
            }
        }
        let Some(missing) = found.iter().position(|found| !found) else { return Ok(values) };
        let element = region.elements.start + missing;
        let words = Region::words(region.columns.as_ref(), element);
        let problem = format!("element {words} of `{name}` is in none of its files");
        let path = self.files.first().and_then(|(path, _)| path.parent()).unwrap_or(Path::new("")).to_path_buf();
        Err(Error::Checkpoint { path, problem })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Indices of a region's elements in the whole tensor, in the region's order.
    fn elements(region: &Region, width: usize) -> Vec<usize> {
        let columns = region.columns.clone().unwrap_or(Columns { range: 0..width, of: width });
        let wide = columns.range.len();
        region.elements.clone().map(|at| at / wide * width + columns.range.start + at % wide).collect()
    }

    fn region(width: usize, rows: usize) -> impl Strategy<Value = Region> {
        (0..width, 1..=width, any::<bool>(), 0..=width * rows, 0..=width * rows).prop_map(
            move |(from, len, all, a, b)| {
                let columns = (!all).then(|| Columns { range: from..(from + len).min(width), of: width });
                let most = columns.as_ref().map_or(width, |columns| columns.range.len()) * rows;
                let (a, b) = (a.min(most), b.min(most));
                Region { columns, elements: a.min(b)..a.max(b) }
            },
        )
    }

    proptest! {
        #[test]
        fn regions_have_in_common_what_their_elements_have(
            (width, a, b) in (1usize..7, 1usize..6)
                .prop_flat_map(|(width, rows)| (Just(width), region(width, rows), region(width, rows)))
        ) {
            let (of_a, of_b) = (elements(&a, width), elements(&b, width));
            let mut got = vec![None; of_a.len()];
            for (to, from, len) in a.common(&b) {
                for i in 0..len {
                    prop_assert!(got[to + i].replace(of_b[from + i]).is_none());
                }
            }
            for (element, got) in of_a.iter().zip(got) {
                prop_assert_eq!(got, of_b.contains(element).then_some(*element));
            }
            prop_assert_eq!(a.end(), of_a.last().map_or(a.elements.end, |last| last + 1));
            let words = Region::words(a.columns.as_ref(), a.elements.start);
            prop_assert_eq!(Region::parse(&words, a.elements.len()), Some(a));
        }
    }

    #[test]
    fn several_slices_of_a_tensor_are_read_as_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("shard");
        let slice =
            |start: usize, values: Vec<f32>| Slice { name: "w".into(), columns: None, start, values: Arc::new(values) };
        write(&super::super::Disk, &path, &[slice(3, vec![3.0, 4.0]), slice(0, vec![0.0, 1.0, 2.0])]).expect("written");
        let tensors = Tensors::open(vec![path]).expect("read");
        assert_eq!((tensors.names().collect::<Vec<_>>(), tensors.len("w")), (vec!["w"], Some(5)));
        let all = tensors.read("w", &Region { columns: None, elements: 0..5 }).expect("all of it");
        assert_eq!(all, [0.0, 1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn a_file_that_could_not_be_read_back_is_not_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("shard");
        // The header holds each name twice.
        let slice = |name: String| Slice { name, columns: None, start: 0, values: Arc::new(vec![1.0]) };
        let error = write(&super::super::Disk, &path, &[slice("x".repeat(50_000_000))]).expect_err("refused");
        assert!(error.to_string().contains("shard: its header would have 1000"), "{error}");
        assert!(!path.exists());
        write(&super::super::Disk, &path, &[slice("x".repeat(100))]).expect("written");
        assert_eq!(Tensors::open(vec![path]).expect("read").names().count(), 1);
    }

    #[test]
    fn columns_that_cannot_be_are_refused() {
        for words in ["", "x", "1 in columns 3..3 of 8", "1 in columns 3..9 of 8", "1 in columns 3 of 8", "-1"] {
            assert_eq!(Region::parse(words, 4), None, "{words}");
        }
        assert_eq!(Region::parse(&usize::MAX.to_string(), 4), None);
    }
}
