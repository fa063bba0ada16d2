//! Reads documents: from a folder, a text file, JSON records, or Parquet; all but Parquet also as .gz or .zst.

use super::{
    Content, Skipped,
    listing::{Entry, Listing},
    open::{Compression, open, open_counted},
    progress::{Progress, unwatched},
    records::{self, Shape},
    skipped::few,
    text::{Look, Parts, look, probe},
};
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// Extensions of files that describe a data set and may lie in its folder.
const DESCRIBES: [&str; 4] = ["md", "json", "yaml", "yml"];

/// One document of a source.
#[derive(Debug, Clone, PartialEq)]
pub struct Text {
    /// Path below the folder, or `file:line`: stable from run to run.
    pub name: String,
    /// The document's content, not empty.
    pub content: Content,
}

/// The documents of a source, in a fixed order.
#[derive(Debug, Clone, PartialEq)]
pub struct Texts {
    /// The documents, sorted by path or in the order of the lines.
    pub documents: Vec<Text>,
    /// Files and documents that were left out.
    pub skipped: Skipped,
    /// Files whose names say that they are for evaluation, not for training.
    pub suspects: Vec<String>,
}

/// Reads the documents at `path` into memory: a folder of text files, a text file, JSON records (`.jsonl`: one per line; `.json`:
/// one per line, an array of them, or a single one) in a form that [`Content`] knows, or a `.parquet` file with such columns
/// (feature `parquet`); all but Parquet also as `.gz` or `.zst`. Training itself reads documents one at a time.
///
/// In a folder, hidden files, what `.gitignore` or `.ignore` name, model folders and `exclude`, with everything below, are
/// left out. A folder of records, with no text beside them but what describes them, is one data set in parts, read in the
/// order of their paths. What is not read is counted in [`Texts::skipped`].
///
/// # Errors
/// [`Error::Data`] when there is no text, a record is malformed, or parts of a data set lie beside other text; [`Error::Io`]
/// when the system refuses.
pub fn read(path: &Path, exclude: &[PathBuf]) -> Result<Texts> {
    let listing = Listing::new(path, exclude)?;
    let progress = Progress::new(&unwatched, path, listing.bytes());
    let Survey { files, mut skipped, suspects, .. } = Survey::new(&listing, &progress)?;
    let mut documents: Vec<Text> = Vec::new();
    let mut text = String::new();
    for file in &files {
        file.read(&progress, &mut |item| {
            match item {
                Item::Document(document) if document.content.is_unlearned() => skipped.silent += 1,
                Item::Document(document) => documents.push(document),
                Item::Part { text: part, last } => {
                    text.push_str(&part);
                    if last {
                        let content = Content::Text(std::mem::take(&mut text));
                        documents.push(Text { name: file.name.clone(), content });
                    }
                }
            }
            Ok(())
        })?;
    }
    match documents.iter().all(|document| document.content.is_blank()) {
        true => Err(nothing(path, &skipped)),
        false => Ok(Texts { documents, skipped, suspects }),
    }
}

/// The error that a source holds nothing to learn.
pub(super) fn nothing(path: &Path, skipped: &Skipped) -> Error {
    let problem = match (path.is_dir(), skipped.words()) {
        (_, Some(skipped)) => format!("no text to train on; {skipped}"),
        (true, _) => "no text to train on: no files that are neither hidden nor ignored".into(),
        (false, _) => "no text to train on: the file is empty".into(),
    };
    Error::Data { path: path.into(), problem }
}

/// The form in which a file holds documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
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
    form: Form,
}

/// What reading a file yields: a document, or a part of one.
pub(super) enum Item {
    Document(Text),
    /// A part of a text file.
    Part {
        text: String,
        /// Whether the file ends with it.
        last: bool,
    },
}

impl DataFile {
    /// Passes the file's items to `take`, in order; `progress` counts the bytes that were read.
    pub(super) fn read(&self, progress: &Progress<'_>, take: &mut dyn FnMut(Item) -> Result<()>) -> Result<()> {
        let (path, name) = (&self.path, &self.name);
        let mut document = |text: Text| take(Item::Document(text));
        let opened = || open_counted(path, self.compression, progress.count());
        match self.form {
            Form::Lines => records::lines(path, name, opened()?, &mut document)?,
            Form::Values => records::values(path, name, opened()?, &mut document)?,
            Form::Parquet => parquet(path, name, &mut document)?,
            Form::Text(_) => {
                let mut parts = Parts::new(opened()?);
                let mut part = self.part(&mut parts)?;
                while let Some(text) = part {
                    part = self.part(&mut parts)?;
                    take(Item::Part { text, last: part.is_none() })?;
                }
            }
        }
        progress.end_of_file(self.bytes);
        Ok(())
    }

    fn part(&self, parts: &mut Parts) -> Result<Option<String>> {
        let part = parts.next().map_err(Error::io("read", &self.path))?;
        part.map_err(|at| not_utf8(&self.path, at))
    }

    /// Number of bytes of the file's text, if it is a text file.
    fn text(&self) -> Option<u64> {
        match self.form {
            Form::Text(bytes) => Some(bytes),
            _ => None,
        }
    }
}

fn not_utf8(path: &Path, at: u64) -> Error {
    Error::Data { path: path.into(), problem: format!("not UTF-8 text: first bad byte at {at}") }
}

#[cfg(feature = "parquet")]
fn parquet(path: &Path, name: &str, take: records::Take<'_>) -> Result<()> {
    super::parquet::documents(path, name, take)
}

#[cfg(not(feature = "parquet"))]
fn parquet(path: &Path, _: &str, _: records::Take<'_>) -> Result<()> {
    let problem = "this build does not read Parquet: build with `--features parquet`, or convert it to .jsonl";
    Err(Error::Data { path: path.into(), problem: problem.into() })
}

/// The data files of a source, and the files that were left out.
pub(super) struct Survey {
    pub(super) files: Vec<DataFile>,
    pub(super) skipped: Skipped,
    pub(super) suspects: Vec<String>,
}

/// The kind of a file, as its name and, for JSON, its first record tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Named {
    /// Records, which are data whatever else lies in the folder.
    Part(Form),
    /// A .json file of records: it is data where nothing else is, and left out where it lies among other text.
    Records(Form),
    /// A .json file of records in no known form.
    Unknown,
    /// Any other file: text, if it can be read as such.
    Other,
}

impl Survey {
    /// Looks at each file: a text file is read to its end, and of JSON the first record.
    pub(super) fn new(listing: &Listing, progress: &Progress<'_>) -> Result<Self> {
        let mut survey = Self { files: Vec::new(), skipped: listing.skipped.clone(), suspects: Vec::new() };
        let named = listing.entries.iter().map(|entry| Ok((entry, Named::of(entry)?))).collect::<Result<Vec<_>>>()?;
        if !listing.is_folder {
            named.into_iter().try_for_each(|(entry, named)| survey.lone(entry, named))?;
            return Ok(survey);
        }
        let is_part = |named: &Named| matches!(named, Named::Part(_));
        let is_records = |named: &Named| matches!(named, Named::Records(_));
        let parts: Vec<&str> =
            named.iter().filter(|(_, named)| is_part(named)).map(|(entry, _)| entry.name.as_str()).collect();
        let has_records = named.iter().any(|(_, named)| is_records(named));
        let others = if parts.is_empty() && !has_records { Vec::new() } else { other_texts(&named)? };
        if !parts.is_empty() && !others.is_empty() {
            return Err(mixture(&listing.root, &parts, &others));
        }
        let data_set = !parts.is_empty() || has_records && others.is_empty();
        for (entry, named) in named {
            progress.tell()?;
            match (named, data_set) {
                (Named::Part(form), _) | (Named::Records(form), true) => survey.take(entry, form),
                (Named::Records(_), false) => survey.skipped.add("of JSON records beside other text", &entry.name),
                (Named::Unknown, _) => survey.skipped.add("of JSON records in no known form", &entry.name),
                (Named::Other, true) => survey.skipped.add("beside the data set", &entry.name),
                (Named::Other, false) => survey.text(entry)?,
            }
        }
        Ok(survey)
    }

    /// Takes a file that is named by itself, or returns why it cannot be read.
    fn lone(&mut self, entry: &Entry, named: Named) -> Result<()> {
        match named {
            Named::Part(form) | Named::Records(form) => self.take(entry, form),
            Named::Unknown => self.take(entry, Form::Values),
            Named::Other if extension(&entry.name) == "json" => self.take(entry, Form::Values),
            Named::Other => {
                let opened = open(&entry.path, Compression::of(&entry.name).0)?;
                match look(opened).map_err(Error::io("read", &entry.path))? {
                    Look::NotUtf8(at) => return Err(not_utf8(&entry.path, at)),
                    Look::Binary => {
                        return Err(Error::Data { path: entry.path.clone(), problem: "binary, not text".into() });
                    }
                    Look::Empty => {}
                    Look::Text(bytes) => self.take(entry, Form::Text(bytes)),
                }
            }
        }
        Ok(())
    }

    fn text(&mut self, entry: &Entry) -> Result<()> {
        let compression = Compression::of(&entry.name).0;
        let looked = match (open(&entry.path, compression), compression) {
            (Ok(opened), Compression::None) => look(opened).map_err(Error::io("read", &entry.path))?,
            (Err(error), Compression::None) => return Err(error),
            (opened, _) => match opened.ok().and_then(|opened| look(opened).ok()) {
                Some(looked) => looked,
                None => {
                    self.skipped.add("damaged archives", &entry.name);
                    return Ok(());
                }
            },
        };
        match looked {
            Look::Binary => self.skipped.add("binary", &entry.name),
            Look::NotUtf8(_) => self.skipped.add("not UTF-8", &entry.name),
            Look::Empty => self.skipped.add("empty", &entry.name),
            Look::Text(bytes) => self.take(entry, Form::Text(bytes)),
        }
        Ok(())
    }

    fn take(&mut self, entry: &Entry, form: Form) {
        let Entry { name, path, .. } = entry.clone();
        if is_suspect(&name, form) {
            self.suspects.push(name.clone());
        }
        let compression = Compression::of(&name).0;
        self.files.push(DataFile { compression, bytes: entry.bytes(), name, path, form });
    }

    /// Number of bytes of the text, where the source is a single text file.
    pub(super) fn lone_text(&self) -> Option<u64> {
        match &self.files[..] {
            [file] => file.text(),
            _ => None,
        }
    }
}

impl Named {
    fn of(entry: &Entry) -> Result<Self> {
        let compression = Compression::of(&entry.name).0;
        Ok(match &extension(&entry.name)[..] {
            "jsonl" | "ndjson" => Self::Part(Form::Lines),
            "parquet" if compression == Compression::None => Self::Part(Form::Parquet),
            "json" => match open(&entry.path, compression).map(records::shape) {
                Ok(Ok(Shape::Lines)) => Self::Records(Form::Lines),
                Ok(Ok(Shape::Values)) => Self::Records(Form::Values),
                Ok(Ok(Shape::Unknown)) => Self::Unknown,
                Ok(Ok(Shape::Text)) => Self::Other,
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
fn other_texts<'a>(named: &[(&'a Entry, Named)]) -> Result<Vec<&'a str>> {
    let mut others = Vec::new();
    for (entry, _) in named.iter().filter(|(_, named)| *named == Named::Other) {
        let end = extension(&entry.name);
        if end.is_empty() || DESCRIBES.contains(&&end[..]) {
            continue;
        }
        let opened = open(&entry.path, Compression::of(&entry.name).0);
        if opened.is_ok_and(|opened| probe(opened).unwrap_or(false)) {
            others.push(entry.name.as_str());
        }
    }
    Ok(others)
}

/// Whether the name of a data file says that it is for evaluation. Code is full of tests, so only data files are checked.
fn is_suspect(name: &str, form: Form) -> bool {
    let data = !matches!(form, Form::Text(_)) || extension(name) == "txt";
    let judges = ["test", "eval", "evaluation", "val", "valid", "validation", "dev", "heldout"];
    data && name.split(|c: char| !c.is_alphanumeric()).any(|word| judges.contains(&word.to_lowercase().as_str()))
}

/// The error that parts of a data set lie beside text that does not only describe them: either could be meant.
fn mixture(root: &Path, parts: &[&str], others: &[&str]) -> Error {
    let names = |names: &[&str]| few(&names.iter().map(ToString::to_string).collect::<Vec<_>>(), names.len());
    let problem = format!(
        "holds parts of a data set ({}) beside other text ({}): name one of them with --data, or each with a --data of its \
         own, move the others, or list them in a file .ignore",
        names(parts),
        names(others)
    );
    Error::Data { path: root.into(), problem }
}

#[cfg(test)]
mod test;
