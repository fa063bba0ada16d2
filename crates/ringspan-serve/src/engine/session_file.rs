//! A session on disk: the texts of the prefix cache with their keys and values, in the safetensors format.
//!
//! Shape letters: N pages, T tokens of all pages, R numbers of all rows. A row has the keys and values of a token.
//!
//! Tensors: `parents` `[N]` (the page before in the same text, -1 at a text's beginning; a page comes after its
//! parent), `adapters` `[N]` (index into the list of adapters, -1 for the base model), `lengths` `[N]` (tokens),
//! `last_used` `[N]`, `in_window` `[N]` (1 if its rows have all layers, 0 if they have only full-attention layers),
//! `tokens` `[T]`, `rows` `[R]`, page after page, `checksums` `[N]` (CRC-32 of the rows of each page). The metadata say
//! for which model they were computed, and have a CRC-32 of the tensors before `rows`. Nothing depends on the ranks or
//! on the size of their pages.

use super::row_parts::RowPart;
use candle_core::DType;
use ringspan::comm::Buffer;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The version of the format.
const FORMAT: &str = "ringspan-session-2";

/// A header that is longer than this is none: it has a few hundred bytes, and the names of adapters.
const LONGEST_HEADER: u64 = 1 << 24;

/// The model and the layout of the rows of a session; a session can be restored only where they are the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RowFormat {
    /// The model, its weights, and how it computes.
    pub(super) model: String,
    pub(super) dtype: DType,
    /// Numbers of a token in all layers.
    pub(super) width: usize,
    /// The numbers of a row that belong to full-attention layers.
    pub(super) full: RowPart,
}

/// The pages of a session, a page after its parent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct SessionIndex {
    /// Identities of the adapters.
    pub(super) adapters: Vec<String>,
    pub(super) pages: Vec<SessionPage>,
}

/// Tokens whose keys and values are in a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SessionPage {
    /// Index of the page with the tokens before.
    pub(super) parent: Option<usize>,
    /// Index of the adapter with which they were computed.
    pub(super) adapter: Option<usize>,
    pub(super) last_used: u64,
    /// Whether the rows have the sliding-window layers, too.
    pub(super) in_window: bool,
    pub(super) tokens: Vec<u32>,
}

impl RowFormat {
    fn dtype_name(&self) -> &'static str {
        if self.dtype == DType::BF16 { "BF16" } else { "F32" }
    }

    /// Numbers of a row of a page.
    pub(super) fn row_width(&self, in_window: bool) -> usize {
        if in_window { self.width } else { self.full.width() }
    }

    fn bytes(&self, numbers: u64) -> Option<u64> {
        numbers.checked_mul(self.dtype.size_in_bytes() as u64)
    }
}

impl SessionIndex {
    fn tokens(&self) -> u64 {
        self.pages.iter().map(|page| page.tokens.len() as u64).sum()
    }

    /// Numbers of all rows.
    pub(super) fn numbers(&self, format: &RowFormat) -> u64 {
        self.pages.iter().map(|page| (page.tokens.len() * format.row_width(page.in_window)) as u64).sum()
    }

    /// The tensors before `rows`: names, types, shapes and bytes.
    fn tensors(&self) -> Vec<(&'static str, &'static str, u64, Vec<u8>)> {
        let of_pages = |value: &dyn Fn(&SessionPage) -> i64| -> Vec<u8> {
            self.pages.iter().flat_map(|page| value(page).to_le_bytes()).collect()
        };
        let index = |index: Option<usize>| index.map_or(-1, |index| index as i64);
        let (pages, tokens) = (self.pages.len() as u64, self.pages.iter().flat_map(|page| &page.tokens));
        vec![
            ("parents", "I64", pages, of_pages(&|page| index(page.parent))),
            ("adapters", "I64", pages, of_pages(&|page| index(page.adapter))),
            ("lengths", "I64", pages, of_pages(&|page| page.tokens.len() as i64)),
            ("last_used", "I64", pages, of_pages(&|page| page.last_used as i64)),
            ("in_window", "I64", pages, of_pages(&|page| page.in_window.into())),
            ("tokens", "U32", self.tokens(), tokens.flat_map(|token| token.to_le_bytes()).collect()),
        ]
    }
}

/// The header's JSON, which depends on nothing but its arguments, so that a reader can compare it.
fn header(format: &RowFormat, adapters: &[String], [pages, tokens, numbers]: [u64; 3], crc: u32) -> Vec<u8> {
    let metadata = json!({
        "format": FORMAT,
        "model": format.model,
        "adapters": Value::from(adapters).to_string(),
        "crc32": crc.to_string(),
    });
    let mut all = Map::from_iter([("__metadata__".to_owned(), metadata)]);
    let mut at = 0;
    let mut tensor = |name: &str, dtype: &str, shape: Value, bytes: u64| {
        all.insert(name.to_owned(), json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes]}));
        at += bytes;
    };
    for name in ["parents", "adapters", "lengths", "last_used", "in_window"] {
        tensor(name, "I64", json!([pages]), 8 * pages);
    }
    tensor("tokens", "U32", json!([tokens]), 4 * tokens);
    tensor("rows", format.dtype_name(), json!([numbers]), numbers * format.dtype.size_in_bytes() as u64);
    tensor("checksums", "U32", json!([pages]), 4 * pages);
    let mut text = Value::Object(all).to_string().into_bytes();
    // Tensors begin at a multiple of 8 bytes, as safetensors wants it.
    text.resize(text.len().next_multiple_of(8), b' ');
    text
}

/// A session that is being written: to a temporary file, which is renamed once it is complete.
pub(super) struct SessionWriter {
    file: BufWriter<File>,
    path: PathBuf,
    unfinished: PathBuf,
    checksums: Vec<u8>,
}

impl SessionWriter {
    pub(super) fn create(path: &Path, format: &RowFormat, index: &SessionIndex) -> std::io::Result<Self> {
        let unfinished = path.with_extension("unfinished");
        let mut writer = Self {
            file: BufWriter::with_capacity(1 << 20, File::create(&unfinished)?),
            path: path.to_owned(),
            unfinished,
            checksums: Vec::new(),
        };
        let tensors = index.tensors();
        let mut crc = crc32fast::Hasher::new();
        tensors.iter().for_each(|(.., bytes)| crc.update(bytes));
        let sizes = [index.pages.len() as u64, index.tokens(), index.numbers(format)];
        let header = header(format, &index.adapters, sizes, crc.finalize());
        writer.file.write_all(&(header.len() as u64).to_le_bytes())?;
        writer.file.write_all(&header)?;
        tensors.iter().try_for_each(|(.., bytes)| writer.file.write_all(bytes))?;
        Ok(writer)
    }

    /// Writes the rows of the next page.
    pub(super) fn page(&mut self, rows: &Buffer) -> std::io::Result<()> {
        let bytes = bytes_of(rows);
        self.checksums.extend(crc32fast::hash(&bytes).to_le_bytes());
        self.file.write_all(&bytes)
    }

    /// Gives the file its name.
    pub(super) fn finish(mut self) -> std::io::Result<()> {
        self.file.write_all(&std::mem::take(&mut self.checksums))?;
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        std::fs::rename(&self.unfinished, &self.path)
    }
}

impl Drop for SessionWriter {
    fn drop(&mut self) {
        // After `finish`, there is no such file any more.
        let _ = std::fs::remove_file(&self.unfinished);
    }
}

/// A session that is read.
pub(super) struct SessionReader {
    file: File,
    format: RowFormat,
    pub(super) index: SessionIndex,
    /// For each page, where its rows begin in the file, and their checksum.
    rows: Vec<(u64, u32)>,
    /// The page that was read last, and its bytes.
    last: Option<(usize, Vec<u8>)>,
}

impl SessionReader {
    /// Opens a session of the model with this row format; says in a sentence why the file is none.
    pub(super) fn open(path: &Path, format: &RowFormat, vocabulary: usize) -> Result<Self, String> {
        let damaged = |what: &str| format!("the file is damaged: {what}");
        let failed = |error: std::io::Error| format!("the file cannot be read: {error}");
        let mut file = File::open(path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(|_| damaged("it ends in its header"))?;
        let length = u64::from_le_bytes(length);
        if length > LONGEST_HEADER || length > size.saturating_sub(8) {
            return Err(damaged("its header has no length that could be"));
        }
        let mut text = vec![0; length as usize];
        file.read_exact(&mut text).map_err(failed)?;
        let json: Value = serde_json::from_slice(&text).map_err(|_| damaged("its header is no JSON"))?;
        let metadata = |name: &str| json["__metadata__"][name].as_str().unwrap_or_default();
        if metadata("format") != FORMAT {
            return Err(format!("the file's format is '{}', not '{FORMAT}'", metadata("format")));
        }
        if metadata("model") != format.model {
            return Err(format!(
                "the session is of another model, or the model computes otherwise: {}, now {}",
                metadata("model"),
                format.model
            ));
        }
        let adapters: Vec<String> = serde_json::from_str(metadata("adapters")).unwrap_or_default();
        let shape = |name: &str| json[name]["shape"][0].as_u64().unwrap_or(0);
        let [pages, tokens, numbers] = ["parents", "tokens", "rows"].map(shape);
        let crc: u32 = metadata("crc32").parse().map_err(|_| damaged("it has no checksum"))?;
        let before = 8u64.checked_add(length).and_then(|at| pages.checked_mul(40)?.checked_add(at));
        let before = before.and_then(|at| tokens.checked_mul(4)?.checked_add(at));
        let after = before.and_then(|at| format.bytes(numbers)?.checked_add(at));
        let end = after.and_then(|at| pages.checked_mul(4)?.checked_add(at));
        let (Some(before), Some(after)) = (before.filter(|_| end == Some(size)), after) else {
            return Err(damaged(&format!("it has {size} bytes, which its header does not describe")));
        };
        if text != header(format, &adapters, [pages, tokens, numbers], crc) {
            return Err(damaged("its header describes other tensors than a session has"));
        }
        let mut bytes = vec![0; (before - 8 - length) as usize];
        file.read_exact(&mut bytes).map_err(failed)?;
        if crc32fast::hash(&bytes) != crc {
            return Err(damaged("the checksum of its texts is wrong"));
        }
        let mut checksums = vec![0; pages as usize * 4];
        file.seek(SeekFrom::Start(after)).and_then(|_| file.read_exact(&mut checksums)).map_err(failed)?;
        let index = index(&bytes, pages as usize, adapters, vocabulary).ok_or_else(|| damaged("its texts are none"))?;
        if index.numbers(format) != numbers {
            return Err(damaged("its texts have other keys and values than it has"));
        }
        let (mut at, mut rows) = (before, Vec::with_capacity(index.pages.len()));
        for (page, checksum) in index.pages.iter().zip(words(&checksums)) {
            rows.push((at, checksum));
            at += (page.tokens.len() * format.row_width(page.in_window) * format.dtype.size_in_bytes()) as u64;
        }
        Ok(Self { file, format: format.clone(), index, rows, last: None })
    }

    pub(super) fn format(&self) -> &RowFormat {
        &self.format
    }

    /// Appends row `row` of a page to `rows`, with all layers: those that the page does not have are zeros.
    pub(super) fn append_row(&mut self, page: usize, row: usize, rows: &mut Vec<u8>) -> Result<(), String> {
        let (in_window, size) = (self.index.pages[page].in_window, self.format.dtype.size_in_bytes());
        let width = self.format.row_width(in_window) * size;
        if self.last.as_ref().is_none_or(|(last, _)| *last != page) {
            let (at, checksum) = self.rows[page];
            let mut bytes = vec![0; self.index.pages[page].tokens.len() * width];
            let read = self.file.seek(SeekFrom::Start(at)).and_then(|_| self.file.read_exact(&mut bytes));
            read.map_err(|error| format!("the file cannot be read: {error}"))?;
            if crc32fast::hash(&bytes) != checksum {
                return Err("the file is damaged: the checksum of a page's keys and values is wrong".to_owned());
            }
            self.last = Some((page, bytes));
        }
        if let Some((_, bytes)) = &self.last {
            let bytes = &bytes[row * width..(row + 1) * width];
            if in_window {
                rows.extend_from_slice(bytes);
            } else {
                let (start, whole) = (rows.len(), self.format.width * size);
                rows.resize(start + whole, 0);
                let part = self.format.full.scaled(size);
                part.paste_numbers(bytes, &mut rows[start..], whole)
                    .ok_or("a row has another size than its page says")?;
            }
        }
        Ok(())
    }

    /// Rows as a message between ranks.
    pub(super) fn message(&self, bytes: &[u8]) -> Buffer {
        match self.format.dtype {
            DType::BF16 => {
                Buffer::U16(bytes.chunks_exact(2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]])).collect())
            }
            _ => Buffer::F32(words(bytes).map(f32::from_bits).collect()),
        }
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
}

/// The pages that the tensors before `rows` describe; `None` if these cannot be.
fn index(bytes: &[u8], pages: usize, adapters: Vec<String>, vocabulary: usize) -> Option<SessionIndex> {
    let number = |at: usize| {
        bytes.get(8 * at..8 * at + 8).map(|number| i64::from_le_bytes(number.try_into().unwrap_or_default()))
    };
    let mut tokens = words(bytes.get(40 * pages..)?);
    let mut index = SessionIndex { adapters, pages: Vec::with_capacity(pages) };
    for page in 0..pages {
        let column = |column: usize| number(column * pages + page);
        let [parent, adapter, length, last_used] = [column(0)?, column(1)?, column(2)?, column(3)?];
        let in_window = column(4)? == 1;
        let before = |number: i64, end: usize| match usize::try_from(number) {
            Ok(number) if number < end => Some(Some(number)),
            _ => (number == -1).then_some(None),
        };
        let (parent, adapter) = (before(parent, page)?, before(adapter, index.adapters.len())?);
        let length = usize::try_from(length).ok().filter(|length| *length > 0)?;
        let of_page: Vec<u32> = tokens.by_ref().take(length).collect();
        if of_page.len() != length || of_page.iter().any(|token| *token as usize >= vocabulary) {
            return None;
        }
        if parent.is_some_and(|parent| index.pages[parent].adapter != adapter) {
            return None;
        }
        let last_used = u64::try_from(last_used).ok()?;
        index.pages.push(SessionPage { parent, adapter, last_used, in_window, tokens: of_page });
    }
    tokens.next().is_none().then_some(index)
}

/// The bytes of a message, in the order of the file.
fn bytes_of(rows: &Buffer) -> Vec<u8> {
    match rows {
        Buffer::F32(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        Buffer::U16(bits) => bits.iter().flat_map(|bits| bits.to_le_bytes()).collect(),
        _ => Vec::new(),
    }
}
