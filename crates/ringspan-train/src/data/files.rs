//! Where text comes from: a folder, one file, or JSON lines.

use crate::error::{Error, Result};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Files above this size are skipped in folders: dumps and generated tables, not prose or code.
const LARGEST_FILE: u64 = 4 << 20;
/// Git's own test: a NUL this early means the file is not text.
const BINARY_PROBE: usize = 8 << 10;

/// One document of text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    /// Path below the folder, or `file:line`: stable from run to run.
    pub name: String,
    /// The text, not empty.
    pub text: String,
}

/// What a folder held that is no text to learn from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Files with a NUL early on, or not UTF-8.
    pub binary: usize,
    /// Files above 4 MiB.
    pub large: usize,
    /// Files with nothing but white space.
    pub empty: usize,
}

/// The documents of a source, in a fixed order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Texts {
    /// The documents, sorted by path or in the order of the lines.
    pub documents: Vec<Text>,
    /// What was left out.
    pub skipped: Skipped,
}

/// Reads the text at `path`: a folder, a `.jsonl` file (one object with `text` a line), or a text file.
///
/// In a folder, hidden files, what `.gitignore` names, model folders and everything below `exclude` are left out.
///
/// # Errors
/// [`Error::Data`] when there is no text or a line is malformed, [`Error::Io`] when the system refuses.
pub fn read(path: &Path, exclude: &[PathBuf]) -> Result<Texts> {
    let about = std::fs::metadata(path).map_err(Error::io("read", path))?;
    let texts = if about.is_dir() {
        folder(path, exclude)?
    } else {
        let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
        let text = String::from_utf8(bytes).map_err(|e| Error::Data {
            path: path.into(),
            problem: format!("not UTF-8 text: first bad byte at {}", e.utf8_error().valid_up_to()),
        })?;
        let documents = if path.extension().is_some_and(|e| e == "jsonl") {
            lines(path, &text)?
        } else {
            vec![Text { name: name_of(path), text }]
        };
        Texts { documents, skipped: Skipped::default() }
    };
    if texts.documents.iter().all(|d| d.text.trim().is_empty()) {
        let s = texts.skipped;
        let seen = match (about.is_dir(), s.binary + s.large + s.empty) {
            (true, n) if n > 0 => {
                format!(
                    "no text to train on; skipped {} binary, {} over 4 MiB, {} empty files",
                    s.binary, s.large, s.empty
                )
            }
            (true, _) => "no text to train on: no files that are neither hidden nor ignored".into(),
            (false, _) => "no text to train on: the file is empty".into(),
        };
        return Err(Error::Data { path: path.into(), problem: seen });
    }
    Ok(texts)
}

fn name_of(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
}

/// A folder that holds weights is a model or a former output: its JSON is no prose.
fn is_model_folder(path: &Path) -> bool {
    path.join("model.safetensors").exists() || path.join("model.safetensors.index.json").exists()
}

fn folder(root: &Path, exclude: &[PathBuf]) -> Result<Texts> {
    let exclude: Vec<PathBuf> = exclude.iter().filter_map(|p| p.canonicalize().ok()).collect();
    let walk = ignore::WalkBuilder::new(root)
        .require_git(false)
        // A person's global ignore file must not change what a run learns from.
        .git_global(false)
        .filter_entry(move |entry| {
            if entry.depth() == 0 || !entry.file_type().is_some_and(|t| t.is_dir()) {
                return true;
            }
            let path = entry.path();
            !is_model_folder(path) && !path.canonicalize().is_ok_and(|p| exclude.contains(&p))
        })
        .build();
    let mut documents = Vec::new();
    let mut skipped = Skipped::default();
    for entry in walk {
        let entry = entry.map_err(|e| Error::Data { path: root.into(), problem: e.to_string() })?;
        if !entry.file_type().is_some_and(|t| t.is_file()) {
            continue;
        }
        let path = entry.path();
        if std::fs::metadata(path).map_err(Error::io("read", path))?.len() > LARGEST_FILE {
            skipped.large += 1;
            continue;
        }
        let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
        if bytes[..bytes.len().min(BINARY_PROBE)].contains(&0) {
            skipped.binary += 1;
            continue;
        }
        match String::from_utf8(bytes) {
            Err(_) => skipped.binary += 1,
            Ok(text) if text.trim().is_empty() => skipped.empty += 1,
            Ok(text) => {
                let below = path.strip_prefix(root).unwrap_or(path);
                // One spelling on every system, since the split hashes the name.
                let name = below.iter().map(|p| p.to_string_lossy()).collect::<Vec<_>>().join("/");
                documents.push(Text { name, text });
            }
        }
    }
    documents.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Texts { documents, skipped })
}

#[derive(Deserialize)]
struct Line {
    text: String,
}

fn lines(path: &Path, content: &str) -> Result<Vec<Text>> {
    let file = name_of(path);
    let mut documents = Vec::new();
    for (index, line) in content.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let parsed: Line = serde_json::from_str(line).map_err(|e| Error::Data {
            path: path.into(),
            problem: format!("line {}: {e}; each line must be a JSON object with a string `text`", index + 1),
        })?;
        if !parsed.text.is_empty() {
            documents.push(Text { name: format!("{file}:{}", index + 1), text: parsed.text });
        }
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
        write(root, "big.txt", &vec![b'x'; (LARGEST_FILE + 1) as usize]);
        write(root, "model/model.safetensors", b"\0\0");
        write(root, "model/config.json", b"{}");
        write(root, "out/notes.txt", b"no");
        let texts = read(root, &[root.join("out")]).unwrap();
        let names: Vec<_> = texts.documents.iter().map(|d| d.name.as_str()).collect();
        assert_eq!(names, ["a/z.rs", "b.md"]);
        assert_eq!(texts.skipped, Skipped { binary: 2, large: 1, empty: 1 });
    }

    #[test]
    fn json_lines_are_documents_and_a_bad_line_is_named_by_its_number() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "d.jsonl", b"{\"text\":\"one\",\"id\":1}\n\n{\"text\":\"two\"}\n");
        let texts = read(&folder.path().join("d.jsonl"), &[]).unwrap();
        assert_eq!(texts.documents.len(), 2);
        assert_eq!(texts.documents[1], Text { name: "d.jsonl:3".into(), text: "two".into() });

        write(folder.path(), "bad.jsonl", b"{\"text\":\"one\"}\n{\"txt\":\"two\"}\n");
        let message = read(&folder.path().join("bad.jsonl"), &[]).unwrap_err().to_string();
        assert!(message.contains("line 2") && message.contains("`text`"), "{message}");
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
