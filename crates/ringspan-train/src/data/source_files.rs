//! Reads documents: from a folder, a text file, JSON records, or Parquet; all but Parquet also as .gz or .zst.

use super::{
    Content, Skipped, SourceDocument, SourceDocuments,
    decompress::{Compression, open, open_counted},
    json_records::{self, JsonKind},
    listing::{Entry, Listing},
    progress::{Progress, ignore_progress},
    skipped::first_names,
    source_document::DocumentSink,
    text_file::{TextKind, TextParts, classify_text, looks_like_text},
};
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// Extensions of files that describe a data set and may lie in its folder.
const DESCRIPTION_EXTENSIONS: [&str; 4] = ["md", "json", "yaml", "yml"];

/// Reads the documents at `path` into memory: a folder of text files, a text file, JSON records (`.jsonl`: one per line; `.json`:
/// one per line, an array of them, or a single one) in a form that [`Content`] knows, or a `.parquet` file with such columns
/// (feature `parquet`); all but Parquet also as `.gz` or `.zst`. Training itself reads documents one at a time.
///
/// In a folder, hidden files, what `.gitignore` or `.ignore` name, model folders and `exclude`, with everything below, are
/// left out. A folder of records, with no text next to them but what describes them, is one data set in parts, read in the
/// order of their paths. What is not read is counted in [`SourceDocuments::skipped`].
///
/// # Errors
/// [`Error::Data`] when there is no text, a record is malformed, or parts of a data set lie next to other text; [`Error::Io`]
/// when the system refuses.
pub fn read(path: &Path, exclude: &[PathBuf]) -> Result<SourceDocuments> {
    let listing = Listing::new(path, exclude)?;
    let progress = Progress::new(&ignore_progress, path, listing.bytes());
    let SourceFiles { files, mut skipped, evaluation_like_files, .. } = SourceFiles::new(&listing, &progress)?;
    let mut documents: Vec<SourceDocument> = Vec::new();
    let mut text = String::new();
    for file in &files {
        file.read(&progress, &mut |item| {
            match item {
                FileItem::Document(document) if document.content.is_chat_without_targets() => {
                    skipped.without_targets += 1
                }
                FileItem::Document(document) => documents.push(document),
                FileItem::TextPart { text: part, last } => {
                    text.push_str(&part);
                    if last {
                        let content = Content::Text(std::mem::take(&mut text));
                        documents.push(SourceDocument { name: file.name.clone(), content });
                    }
                }
            }
            Ok(())
        })?;
    }
    match documents.iter().all(|document| document.content.has_no_targets()) {
        true => Err(nothing_to_learn(path, &skipped)),
        false => Ok(SourceDocuments { documents, skipped, evaluation_like_files }),
    }
}

/// The error that a source holds nothing to learn.
pub(super) fn nothing_to_learn(path: &Path, skipped: &Skipped) -> Error {
    let problem = match (path.is_dir(), skipped.describe()) {
        (_, Some(skipped)) => format!("no text to train on; {skipped}"),
        (true, _) => "no text to train on: no files that are neither hidden nor ignored".into(),
        (false, _) => "no text to train on: the file is empty".into(),
    };
    Error::Data { path: path.into(), problem }
}

/// The form in which a file holds documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileFormat {
    /// One text of this many bytes.
    Text(u64),
    /// A JSON record in each line.
    Lines,
    /// JSON records in an array, or one after the other.
    Values,
    Parquet,
}

/// A data file of a source.
#[derive(Debug, Clone)]
pub(super) struct DataFile {
    pub(super) name: String,
    path: PathBuf,
    /// Size of the file in bytes, as it is stored.
    bytes: u64,
    compression: Compression,
    format: FileFormat,
}

/// An item that is read from a file: a document, or a part of one.
pub(super) enum FileItem {
    Document(SourceDocument),
    /// A part of a text file.
    TextPart {
        text: String,
        /// Whether the file ends with it.
        last: bool,
    },
}

impl DataFile {
    /// Passes the file's items to `take`, in order; `progress` counts the bytes that were read.
    pub(super) fn read(&self, progress: &Progress<'_>, take: &mut dyn FnMut(FileItem) -> Result<()>) -> Result<()> {
        let (path, name) = (&self.path, &self.name);
        let mut document = |document: SourceDocument| take(FileItem::Document(document));
        let opened = || open_counted(path, self.compression, progress.file_counter());
        match self.format {
            FileFormat::Lines => json_records::lines(path, name, opened()?, &mut document)?,
            FileFormat::Values => json_records::values(path, name, opened()?, &mut document)?,
            FileFormat::Parquet => parquet(path, name, &mut document)?,
            FileFormat::Text(_) => {
                let mut parts = TextParts::new(opened()?);
                let mut part = self.next_part(&mut parts)?;
                while let Some(text) = part {
                    part = self.next_part(&mut parts)?;
                    take(FileItem::TextPart { text, last: part.is_none() })?;
                }
            }
        }
        progress.finish_file(self.bytes);
        Ok(())
    }

    fn next_part(&self, parts: &mut TextParts) -> Result<Option<String>> {
        let part = parts.next().map_err(Error::io("read", &self.path))?;
        part.map_err(|at| not_utf8(&self.path, at))
    }

    /// Number of bytes of the file's text, if it is a text file.
    fn text_bytes(&self) -> Option<u64> {
        match self.format {
            FileFormat::Text(bytes) => Some(bytes),
            _ => None,
        }
    }
}

fn not_utf8(path: &Path, at: u64) -> Error {
    Error::Data { path: path.into(), problem: format!("not UTF-8 text: first bad byte at {at}") }
}

#[cfg(feature = "parquet")]
fn parquet(path: &Path, name: &str, take: DocumentSink<'_>) -> Result<()> {
    super::parquet::documents(path, name, take)
}

#[cfg(not(feature = "parquet"))]
fn parquet(path: &Path, _: &str, _: DocumentSink<'_>) -> Result<()> {
    let problem = "this build does not read Parquet: build with `--features parquet`, or convert it to .jsonl";
    Err(Error::Data { path: path.into(), problem: problem.into() })
}

/// The data files of a source, and the files that were left out.
pub(super) struct SourceFiles {
    pub(super) files: Vec<DataFile>,
    pub(super) skipped: Skipped,
    pub(super) evaluation_like_files: Vec<String>,
}

/// The kind of a file, as its name and, for JSON, its first record tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileKind {
    /// Records, which are data whatever else lies in the folder.
    DataSetPart(FileFormat),
    /// A .json file of records: it is data where nothing else is, and left out where it lies among other text.
    Records(FileFormat),
    /// A .json file of records in no known form.
    UnknownRecords,
    /// Any other file: text, if it can be read as such.
    Other,
}

impl SourceFiles {
    /// Looks at each file: a text file is read to its end, and of JSON the first record.
    pub(super) fn new(listing: &Listing, progress: &Progress<'_>) -> Result<Self> {
        let mut source_files =
            Self { files: Vec::new(), skipped: listing.skipped.clone(), evaluation_like_files: Vec::new() };
        let kinds =
            listing.entries.iter().map(|entry| Ok((entry, FileKind::of(entry)?))).collect::<Result<Vec<_>>>()?;
        if !listing.is_folder {
            kinds.into_iter().try_for_each(|(entry, kind)| source_files.add_single_file(entry, kind))?;
            return Ok(source_files);
        }
        let is_data_set_part = |kind: &FileKind| matches!(kind, FileKind::DataSetPart(_));
        let is_records = |kind: &FileKind| matches!(kind, FileKind::Records(_));
        let parts: Vec<&str> =
            kinds.iter().filter(|(_, kind)| is_data_set_part(kind)).map(|(entry, _)| entry.name.as_str()).collect();
        let has_records = kinds.iter().any(|(_, kind)| is_records(kind));
        let others = if parts.is_empty() && !has_records { Vec::new() } else { other_texts(&kinds)? };
        if !parts.is_empty() && !others.is_empty() {
            return Err(mixed_folder(&listing.root, &parts, &others));
        }
        let data_set = !parts.is_empty() || has_records && others.is_empty();
        for (entry, kind) in kinds {
            progress.report()?;
            match (kind, data_set) {
                (FileKind::DataSetPart(format), _) | (FileKind::Records(format), true) => {
                    source_files.add(entry, format)
                }
                (FileKind::Records(_), false) => {
                    source_files.skipped.add("of JSON records next to other text", &entry.name)
                }
                (FileKind::UnknownRecords, _) => {
                    source_files.skipped.add("of JSON records in no known form", &entry.name)
                }
                (FileKind::Other, true) => source_files.skipped.add("next to the data set", &entry.name),
                (FileKind::Other, false) => source_files.add_text_file(entry)?,
            }
        }
        Ok(source_files)
    }

    /// Takes a file that is named by itself, or returns why it cannot be read.
    fn add_single_file(&mut self, entry: &Entry, kind: FileKind) -> Result<()> {
        match kind {
            FileKind::DataSetPart(format) | FileKind::Records(format) => self.add(entry, format),
            FileKind::UnknownRecords => self.add(entry, FileFormat::Values),
            FileKind::Other if extension(&entry.name) == "json" => self.add(entry, FileFormat::Values),
            FileKind::Other => {
                let opened = open(&entry.path, Compression::of(&entry.name).0)?;
                match classify_text(opened).map_err(Error::io("read", &entry.path))? {
                    TextKind::NotUtf8(at) => return Err(not_utf8(&entry.path, at)),
                    TextKind::Binary => {
                        return Err(Error::Data { path: entry.path.clone(), problem: "binary, not text".into() });
                    }
                    TextKind::Empty => {}
                    TextKind::Text(bytes) => self.add(entry, FileFormat::Text(bytes)),
                }
            }
        }
        Ok(())
    }

    fn add_text_file(&mut self, entry: &Entry) -> Result<()> {
        let compression = Compression::of(&entry.name).0;
        let text_kind = match (open(&entry.path, compression), compression) {
            (Ok(opened), Compression::None) => classify_text(opened).map_err(Error::io("read", &entry.path))?,
            (Err(error), Compression::None) => return Err(error),
            (opened, _) => match opened.ok().and_then(|opened| classify_text(opened).ok()) {
                Some(text_kind) => text_kind,
                None => {
                    self.skipped.add("damaged archives", &entry.name);
                    return Ok(());
                }
            },
        };
        match text_kind {
            TextKind::Binary => self.skipped.add("binary", &entry.name),
            TextKind::NotUtf8(_) => self.skipped.add("not UTF-8", &entry.name),
            TextKind::Empty => self.skipped.add("empty", &entry.name),
            TextKind::Text(bytes) => self.add(entry, FileFormat::Text(bytes)),
        }
        Ok(())
    }

    fn add(&mut self, entry: &Entry, format: FileFormat) {
        let Entry { name, path, .. } = entry.clone();
        if is_evaluation_file(&name, format) {
            self.evaluation_like_files.push(name.clone());
        }
        let compression = Compression::of(&name).0;
        self.files.push(DataFile { compression, bytes: entry.bytes(), name, path, format });
    }

    /// Number of bytes of the text, where the source is a single text file.
    pub(super) fn single_text_bytes(&self) -> Option<u64> {
        match &self.files[..] {
            [file] => file.text_bytes(),
            _ => None,
        }
    }
}

impl FileKind {
    fn of(entry: &Entry) -> Result<Self> {
        let compression = Compression::of(&entry.name).0;
        Ok(match &extension(&entry.name)[..] {
            "jsonl" | "ndjson" => Self::DataSetPart(FileFormat::Lines),
            "parquet" if compression == Compression::None => Self::DataSetPart(FileFormat::Parquet),
            "json" => match open(&entry.path, compression).map(json_records::json_kind) {
                Ok(Ok(JsonKind::Lines)) => Self::Records(FileFormat::Lines),
                Ok(Ok(JsonKind::Values)) => Self::Records(FileFormat::Values),
                Ok(Ok(JsonKind::Unknown)) => Self::UnknownRecords,
                Ok(Ok(JsonKind::Text)) => Self::Other,
                Ok(Err(error)) => return Err(Error::io("read", &entry.path)(error)),
                Err(error) => return Err(error),
            },
            _ => Self::Other,
        })
    }
}

/// The extension of a file's name, in small letters and without that of its compression.
fn extension(name: &str) -> String {
    let (_, inner) = Compression::of(name);
    Path::new(inner).extension().map(|end| end.to_string_lossy().to_lowercase()).unwrap_or_default()
}

/// Names of text files that do more than describe a data set.
fn other_texts<'a>(kinds: &[(&'a Entry, FileKind)]) -> Result<Vec<&'a str>> {
    let mut others = Vec::new();
    for (entry, _) in kinds.iter().filter(|(_, kind)| *kind == FileKind::Other) {
        let end = extension(&entry.name);
        if end.is_empty() || DESCRIPTION_EXTENSIONS.contains(&&end[..]) {
            continue;
        }
        let opened = open(&entry.path, Compression::of(&entry.name).0);
        if opened.is_ok_and(|opened| looks_like_text(opened).unwrap_or(false)) {
            others.push(entry.name.as_str());
        }
    }
    Ok(others)
}

/// Whether the name of a data file says that it is for evaluation. Code is full of tests, so only data files are checked.
fn is_evaluation_file(name: &str, format: FileFormat) -> bool {
    let data = !matches!(format, FileFormat::Text(_)) || extension(name) == "txt";
    let evaluation_words = ["test", "eval", "evaluation", "val", "valid", "validation", "dev", "heldout"];
    data && name
        .split(|c: char| !c.is_alphanumeric())
        .any(|word| evaluation_words.contains(&word.to_lowercase().as_str()))
}

/// The error that parts of a data set lie next to text that does not only describe them: either could be meant.
fn mixed_folder(root: &Path, parts: &[&str], others: &[&str]) -> Error {
    let names = |names: &[&str]| first_names(&names.iter().map(ToString::to_string).collect::<Vec<_>>(), names.len());
    let problem = format!(
        "holds parts of a data set ({}) next to other text ({}): name one of them with --data, or each with a --data of its \
         own, move the others, or list them in a file .ignore",
        names(parts),
        names(others)
    );
    Error::Data { path: root.into(), problem }
}

#[cfg(test)]
mod test;
