//! Where documents come from: a folder, one file, JSON lines, or Parquet.

use super::Content;
use crate::{
    config::RUN_FILE,
    error::{Error, Result},
};
use ringspan_models::adapter;
use serde_json::Value;
use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

/// Git's own test: a NUL this early means the file is not text.
const BINARY_PROBE: u64 = 8 << 10;

/// One document.
#[derive(Debug, Clone, PartialEq)]
pub struct Text {
    /// Path below the folder, or `file:line`: stable from run to run.
    pub name: String,
    /// What it says, not empty.
    pub content: Content,
}

/// What a folder held that is no text to learn from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Files with a NUL early on, or not UTF-8.
    pub binary: usize,
    /// Files with nothing but white space.
    pub empty: usize,
    /// Conversations in which the assistant says nothing, and empty completions.
    pub silent: usize,
}

/// The documents of a source, in a fixed order.
#[derive(Debug, Clone, PartialEq)]
pub struct Texts {
    /// The documents, sorted by path or in the order of the lines.
    pub documents: Vec<Text>,
    /// What was left out.
    pub skipped: Skipped,
    /// Files whose names say that they are to judge by, not to learn from.
    pub suspects: Vec<String>,
}

/// Reads the documents at `path`: a folder of text files, a text file, a `.jsonl` file of objects with `text`, `messages`,
/// or `prompt` and `completion`, or a `.parquet` file with such columns (feature `parquet`).
///
/// In a folder, hidden files, what `.gitignore` or `.ignore` name, model folders and `exclude`, with everything below, are
/// left out. A folder of `.jsonl` and `.parquet` files, with no text beside them but what describes them, is one data set in
/// parts, read in the order of their paths.
///
/// # Errors
/// [`Error::Data`] when there is no text, a line is malformed, or parts of a data set lie beside other text; [`Error::Io`]
/// when the system refuses.
pub fn read(path: &Path, exclude: &[PathBuf]) -> Result<Texts> {
    let about = std::fs::metadata(path).map_err(Error::io("read", path))?;
    let mut texts = if about.is_dir() {
        folder(path, exclude)?
    } else {
        Texts { documents: file(path, &name_of(path))?, skipped: Skipped::default(), suspects: Vec::new() }
    };
    let silent = |d: &Text| !matches!(d.content, Content::Text(_)) && d.content.is_blank();
    let all = texts.documents.len();
    texts.documents.retain(|d| !silent(d));
    texts.skipped.silent = all - texts.documents.len();
    if texts.documents.iter().all(|d| d.content.is_blank()) {
        let seen = match (about.is_dir(), texts.skipped.words()) {
            (_, Some(skipped)) => format!("no text to train on; skipped {skipped}"),
            (true, _) => "no text to train on: no files that are neither hidden nor ignored".into(),
            (false, _) => "no text to train on: the file is empty".into(),
        };
        return Err(Error::Data { path: path.into(), problem: seen });
    }
    Ok(texts)
}

impl Skipped {
    /// What was skipped, where something was.
    pub(crate) fn words(&self) -> Option<String> {
        let Self { binary, empty, silent } = *self;
        let files = format!("{binary} binary, {empty} empty files");
        let silent_words = format!("{silent} documents without anything to learn");
        match (binary + empty, silent) {
            (0, 0) => None,
            (_, 0) => Some(files),
            (0, _) => Some(silent_words),
            _ => Some(format!("{files}, {silent_words}")),
        }
    }
}

fn file(path: &Path, name: &str) -> Result<Vec<Text>> {
    let extension = path.extension().unwrap_or_default();
    if extension == "parquet" {
        return parquet(path, name);
    }
    let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
    let text = String::from_utf8(bytes).map_err(|e| Error::Data {
        path: path.into(),
        problem: format!("not UTF-8 text: first bad byte at {}", e.utf8_error().valid_up_to()),
    })?;
    if extension == "jsonl" {
        return lines(path, name, &text);
    }
    Ok(vec![Text { name: name.into(), content: Content::Text(text) }])
}

#[cfg(feature = "parquet")]
fn parquet(path: &Path, name: &str) -> Result<Vec<Text>> {
    super::parquet::documents(path, name)
}

#[cfg(not(feature = "parquet"))]
fn parquet(path: &Path, _: &str) -> Result<Vec<Text>> {
    let problem = "this build does not read Parquet: build with `--features parquet`, or convert it to .jsonl";
    Err(Error::Data { path: path.into(), problem: problem.into() })
}

fn name_of(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
}

/// A folder that holds weights or a run is a model or a former output: its JSON is no prose, and its metrics no data.
fn is_model_folder(path: &Path) -> bool {
    ["model.safetensors", "model.safetensors.index.json", adapter::CONFIG, RUN_FILE]
        .iter()
        .any(|name| path.join(name).exists())
}

fn folder(root: &Path, exclude: &[PathBuf]) -> Result<Texts> {
    let exclude: Vec<PathBuf> = exclude.iter().filter_map(|p| p.canonicalize().ok()).collect();
    let walk = ignore::WalkBuilder::new(root)
        .require_git(false)
        // A person's global ignore file must not change what a run learns from.
        .git_global(false)
        .filter_entry(move |entry| {
            let path = entry.path();
            let folder = entry.file_type().is_some_and(|t| t.is_dir());
            entry.depth() == 0
                || !(folder && is_model_folder(path) || path.canonicalize().is_ok_and(|p| exclude.contains(&p)))
        })
        .build();
    let mut files = Vec::new();
    for entry in walk {
        let entry = entry.map_err(|e| Error::Data { path: root.into(), problem: e.to_string() })?;
        if entry.file_type().is_some_and(|t| t.is_file()) {
            // One spelling on every system, since the split hashes the name.
            let below = entry.path().strip_prefix(root).unwrap_or(entry.path());
            let name = below.iter().map(|p| p.to_string_lossy()).collect::<Vec<_>>().join("/");
            files.push((name, entry.into_path()));
        }
    }
    files.sort();
    let mut documents = Vec::new();
    let mut skipped = Skipped::default();
    let suspects = files.iter().filter(|(name, path)| is_suspect(name, path)).map(|(name, _)| name.clone()).collect();
    if files.iter().any(|(_, path)| is_part(path)) {
        refuse_mixture(root, &files)?;
        for (name, path) in files.iter().filter(|(_, path)| is_part(path)) {
            documents.extend(file(path, name)?);
        }
        return Ok(Texts { documents, skipped, suspects });
    }
    for (name, path) in &files {
        let bytes = match probe(path)? {
            true => std::fs::read(path).map_err(Error::io("read", path))?,
            false => {
                skipped.binary += 1;
                continue;
            }
        };
        match String::from_utf8(bytes) {
            Err(_) => skipped.binary += 1,
            Ok(text) if text.trim().is_empty() => skipped.empty += 1,
            Ok(text) => documents.push(Text { name: name.clone(), content: Content::Text(text) }),
        }
    }
    Ok(Texts { documents, skipped, suspects })
}

/// Whether a file begins as text does.
fn probe(path: &Path) -> Result<bool> {
    let mut head = Vec::new();
    let file = File::open(path).map_err(Error::io("read", path))?;
    file.take(BINARY_PROBE).read_to_end(&mut head).map_err(Error::io("read", path))?;
    Ok(!head.contains(&0))
}

/// Whether a file is a part of a data set.
fn is_part(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "jsonl" || extension == "parquet")
}

/// Whether the name of data says that it is there to judge by. Code is full of tests, so only data is looked at.
fn is_suspect(name: &str, path: &Path) -> bool {
    let data = is_part(path) || path.extension().is_some_and(|extension| extension == "txt");
    let judges = ["test", "eval", "evaluation", "val", "valid", "validation", "dev", "heldout"];
    data && name.split(|c: char| !c.is_alphanumeric()).any(|word| judges.contains(&word.to_lowercase().as_str()))
}

/// Refuses text beside the parts of a data set, other than what describes them: either could be meant, and learning the
/// parts as they are written would teach JSON.
fn refuse_mixture(root: &Path, files: &[(String, PathBuf)]) -> Result<()> {
    let describes = |path: &Path| match path.extension().and_then(|extension| extension.to_str()) {
        Some(extension) => ["md", "json", "yaml", "yml"].contains(&extension),
        None => true,
    };
    let (parts, beside): (Vec<_>, Vec<_>) = files.iter().partition(|(_, path)| is_part(path));
    let mut others = Vec::new();
    for (name, path) in beside.into_iter().filter(|(_, path)| !describes(path)) {
        if probe(path)? {
            others.push(name.as_str());
        }
    }
    if others.is_empty() {
        return Ok(());
    }
    let few = |names: &[&str]| match names.len() {
        0..4 => names.join(", "),
        n => format!("{} and {} more", names[..3].join(", "), n - 3),
    };
    let problem = format!(
        "holds parts of a data set ({}) beside other text ({}): name one of them with --data, move the others, or list \
         them in a file .ignore",
        few(&parts.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>()),
        few(&others)
    );
    Err(Error::Data { path: root.into(), problem })
}

fn lines(path: &Path, file: &str, content: &str) -> Result<Vec<Text>> {
    let mut documents = Vec::new();
    for (index, line) in content.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let object: Value = serde_json::from_str(line).map_err(|e| Error::Data {
            path: path.into(),
            problem: format!("line {}: {e}; each line must be a JSON object", index + 1),
        })?;
        let content = Content::from_object(object)
            .map_err(|problem| Error::Data { path: path.into(), problem: format!("line {} {problem}", index + 1) })?;
        documents.extend(content.map(|content| Text { name: format!("{file}:{}", index + 1), content }));
    }
    Ok(documents)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, name: &str, content: &[u8]) {
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    #[test]
    fn a_folder_of_parts_is_one_data_set_and_a_folder_of_text_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        write(root, "README.md", b"# What this is");
        write(root, "LICENSE", b"free");
        write(root, "data/b.jsonl", b"{\"text\": \"third\"}\n");
        write(root, "data/a.jsonl", b"{\"text\": \"first\"}\n\n{\"text\": \"second\"}\n");
        let names = |texts: &Texts| texts.documents.iter().map(|d| d.name.clone()).collect::<Vec<_>>();
        let parts = read(root, &[]).unwrap();
        assert_eq!(names(&parts), ["data/a.jsonl:1", "data/a.jsonl:3", "data/b.jsonl:1"]);
        write(root, "data/b.jsonl", b"{\"text\": 3}\n");
        let message = read(root, &[]).unwrap_err().to_string();
        assert!(message.contains("b.jsonl") && message.contains("line 1"), "{message}");
        write(root, "data/b.jsonl", b"{\"text\": \"third\"}\n");
        write(root, "plot.png", b"\x89PNG\0\0");
        assert_eq!(read(root, &[]).unwrap().documents.len(), 3, "an image is no text");
        write(root, "code.rs", b"fn main() {}");
        for other in ["a.py", "b.txt", "c.txt"] {
            write(root, other, b"text");
        }
        let message = read(root, &[]).unwrap_err().to_string();
        for part in ["data/a.jsonl, data/b.jsonl", "a.py, b.txt, c.txt and 1 more", "--data", ".ignore"] {
            assert!(message.contains(part), "{part}: {message}");
        }
        write(root, ".ignore", b"*.py\n*.txt\n*.rs\n");
        assert_eq!(names(&read(root, &[]).unwrap()), names(&parts));
    }

    #[test]
    fn data_to_judge_by_is_named_and_can_be_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for name in ["train-0.jsonl", "test-0.jsonl", "Valid/x.jsonl", "contest.jsonl"] {
            write(root, name, b"{\"text\": \"words\"}\n");
        }
        let texts = read(root, &[]).unwrap();
        assert_eq!(texts.suspects, ["Valid/x.jsonl", "test-0.jsonl"]);
        assert_eq!(texts.documents.len(), 4);
        let left = read(root, &[root.join("test-0.jsonl"), root.join("Valid")]).unwrap();
        assert!(left.suspects.is_empty());
        assert_eq!(left.documents.len(), 2);
    }

    #[test]
    fn the_longest_text_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let long = "a long book. ".repeat(500_000);
        write(folder.path(), "book.txt", long.as_bytes());
        write(folder.path(), "note.txt", b"short");
        let texts = read(folder.path(), &[]).unwrap();
        assert_eq!((texts.documents.len(), texts.skipped), (2, Skipped::default()));
        assert_eq!(texts.documents[0].content, Content::Text(long));
    }

    #[test]
    fn a_folder_yields_its_text_sorted_and_leaves_out_what_is_no_text() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        write(root, "b.md", b"second");
        write(root, "a/z.rs", b"first");
        write(root, ".hidden", b"no");
        write(root, ".gitignore", b"build/\n");
        write(root, "build/x.txt", b"no");
        write(root, "image.png", b"\x89PNG\0\0");
        write(root, "latin.txt", b"caf\xe9");
        write(root, "blank.txt", b" \n");
        write(root, "model/model.safetensors", b"\0\0");
        write(root, "model/config.json", b"{}");
        write(root, "stopped/train.toml", b"steps = 9");
        write(root, "stopped/metrics.jsonl", b"{\"step\": 1}");
        write(root, "out/notes.txt", b"no");
        let texts = read(root, &[root.join("out")]).unwrap();
        let names: Vec<_> = texts.documents.iter().map(|d| d.name.as_str()).collect();
        assert_eq!(names, ["a/z.rs", "b.md"]);
        assert_eq!(texts.skipped, Skipped { binary: 2, empty: 1, silent: 0 });
    }

    #[test]
    fn json_lines_are_documents_and_a_bad_line_is_named_by_its_number() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "d.jsonl", b"{\"text\":\"one\",\"id\":1}\n\n{\"text\":\"two\"}\n");
        let texts = read(&folder.path().join("d.jsonl"), &[]).unwrap();
        assert_eq!(texts.documents.len(), 2);
        assert_eq!(texts.documents[1], Text { name: "d.jsonl:3".into(), content: Content::Text("two".into()) });

        write(folder.path(), "bad.jsonl", b"{\"text\":\"one\"}\n{\"txt\":\"two\"}\n");
        let message = read(&folder.path().join("bad.jsonl"), &[]).unwrap_err().to_string();
        assert!(message.contains("line 2") && message.contains("`text`"), "{message}");
    }

    #[test]
    fn conversations_without_an_assistant_are_counted_and_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let user = r#"{"messages":[{"role":"user","content":"hi"}]}"#;
        let both = r#"{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"yes"}]}"#;
        let none = r#"{"prompt":"p","completion":""}"#;
        write(folder.path(), "c.jsonl", format!("{user}\n{both}\n{none}\n").as_bytes());
        let texts = read(&folder.path().join("c.jsonl"), &[]).unwrap();
        assert_eq!(texts.documents.iter().map(|d| d.name.as_str()).collect::<Vec<_>>(), ["c.jsonl:2"]);
        assert_eq!(texts.skipped.words().unwrap(), "2 documents without anything to learn");
        write(folder.path(), "c.jsonl", user.as_bytes());
        let message = read(&folder.path().join("c.jsonl"), &[]).unwrap_err().to_string();
        assert!(message.contains("skipped 1 documents without"), "{message}");
    }

    #[cfg(not(feature = "parquet"))]
    #[test]
    fn parquet_names_the_feature_that_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "d.parquet", b"PAR1");
        let message = read(&folder.path().join("d.parquet"), &[]).unwrap_err().to_string();
        assert!(message.contains("d.parquet") && message.contains("--features parquet"), "{message}");
    }

    #[test]
    fn a_source_without_text_says_so() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "x.bin", b"\0");
        let message = read(folder.path(), &[]).unwrap_err().to_string();
        assert!(message.contains("1 binary"), "{message}");
        let missing = read(&folder.path().join("nothing"), &[]).unwrap_err().to_string();
        assert!(missing.contains("nothing"), "{missing}");
        write(folder.path(), "latin.txt", b"caf\xe9");
        let message = read(&folder.path().join("latin.txt"), &[]).unwrap_err().to_string();
        assert!(message.contains("byte at 3"), "{message}");
    }
}
