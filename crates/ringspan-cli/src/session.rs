//! The folder of `--session-dir`, to which `ringspan serve` saves its cache, and from which it restores it.
//!
//! Each model, and each way in which it computes, has a file of its own, so that a server with other settings does not replace what it
//! cannot read. A file from which something was left out, because an adapter is not loaded or the cache is smaller than the file, stays as
//! well: what is cached is saved to another one.

use crate::model::ModelArgs;
use crate::output;
use anyhow::{Context, Result};
use ringspan_serve::engine::{Client, SessionSize};
use ringspan_serve::paged::KvDtype;
use std::path::{Path, PathBuf};

/// The sessions in a folder that are of a model.
pub(crate) struct Session {
    folder: PathBuf,
    model: String,
    /// The files from which nothing was left out. The first is replaced when the session is saved; the others are removed then, since their
    /// texts are in the cache, as far as later ones have left them there.
    restored: Vec<PathBuf>,
}

/// Makes the folder of sessions, if there is none.
pub(crate) fn create_folder(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("--session-dir {}", folder.display()))
}

/// The name of the file with a number; the first has none in its name.
fn file_name(number: usize) -> String {
    if number == 0 { "session.safetensors".to_owned() } else { format!("session-{number}.safetensors") }
}

/// The number of a file with such a name.
fn number_of(name: &str) -> Option<usize> {
    let number = match name.strip_suffix(".safetensors")?.strip_prefix("session")? {
        "" => 0,
        number => number.strip_prefix('-')?.parse().ok()?,
    };
    (file_name(number) == name).then_some(number)
}

impl Session {
    /// The sessions in `folder`. Sequences may have up to `max_model_len` tokens, whose keys and values are in `kv_dtype`, or in the
    /// model's type.
    pub(crate) fn new(
        folder: &Path,
        model: &ModelArgs,
        max_model_len: usize,
        kv_dtype: Option<KvDtype>,
    ) -> Result<Self> {
        let mut model = model.fingerprint(max_model_len)?;
        if let Some(dtype) = kv_dtype {
            model += &format!(", cached in {dtype:?}");
        }
        Ok(Self { folder: folder.to_owned(), model, restored: Vec::new() })
    }

    /// Restores all sessions of this model; says what it did.
    pub(crate) fn restore(&mut self, client: &Client) {
        let numbers = match self.numbers() {
            Ok(numbers) => numbers,
            Err(problem) => {
                return output::note(format!(
                    "no session is restored, {} cannot be read: {problem}",
                    self.folder.display()
                ));
            }
        };
        for number in numbers {
            let file = self.folder.join(file_name(number));
            let shown = file.display();
            match client.restore_session(&file, &self.model) {
                Ok(SessionSize { tokens, bytes, left_out: 0 }) => {
                    output::note(format!(
                        "restored a session of {tokens} tokens ({:.1} MB): {shown}",
                        bytes as f64 / 1e6
                    ));
                    self.restored.push(file);
                }
                Ok(SessionSize { tokens, bytes, left_out }) => output::note(format!(
                    "restored {tokens} tokens ({:.1} MB) of a session: {shown}; the file stays, since it has {left_out} more, of adapters that \
                     are not loaded or beyond the size of the cache",
                    bytes as f64 / 1e6
                )),
                Err(problem) => {
                    output::note(format!("the session in {shown} is not restored, and stays there: {problem}"))
                }
            }
        }
    }

    /// Saves the session; says what it did.
    pub(crate) fn save(&self, client: &Client) {
        let free = || Ok(self.folder.join(file_name(self.numbers()?.last().map_or(0, |last| last + 1))));
        let file = match self.restored.first().cloned().map_or_else(free, std::io::Result::Ok) {
            Ok(file) => file,
            Err(problem) => {
                let folder = self.folder.display();
                return output::note(format!(
                    "the session is not saved, what was cached is lost: {folder} cannot be read: {problem}"
                ));
            }
        };
        let shown = file.display();
        match client.save_session(&file, &self.model) {
            Ok(SessionSize { tokens: 0, .. }) if self.restored.is_empty() => {
                output::note("no session is saved, since nothing is cached");
                remove(&file);
            }
            Ok(SessionSize { tokens, bytes, .. }) => {
                output::note(format!("saved a session of {tokens} tokens ({:.1} MB): {shown}", bytes as f64 / 1e6));
                self.restored.iter().skip(1).for_each(|contained| remove(contained));
            }
            Err(problem) => {
                output::note(format!("the session in {shown} is not saved, what was cached is lost: {problem}"))
            }
        }
    }

    /// The numbers of the files in the folder, in ascending order.
    fn numbers(&self) -> std::io::Result<Vec<usize>> {
        let mut numbers = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            numbers.extend(entry?.file_name().to_str().and_then(number_of));
        }
        numbers.sort_unstable();
        Ok(numbers)
    }
}

fn remove(file: &Path) {
    if let Err(problem) = std::fs::remove_file(file) {
        output::note(format!("{} cannot be removed: {problem}", file.display()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_sessions_are_found_by_their_names() {
        for number in [0, 1, 12] {
            assert_eq!(number_of(&file_name(number)), Some(number));
        }
        for other in
            ["session-0.safetensors", "session-01.safetensors", "session-a.safetensors", "session.safetensors.tmp", "a"]
        {
            assert_eq!(number_of(other), None, "{other}");
        }
    }
}
