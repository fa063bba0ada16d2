//! Checkpoints that are whole or not there at all. The protocol is in `README.md` next to this file.

mod storage;
mod tensors;

pub use crate::{durable_file::write_file, watchdog::LossStatistics};
pub use storage::{Disk, Sink, Storage};
pub use tensors::{Columns, Region, SharedValues, Slice, Tensors};

use crate::{
    data::{PackerPosition, SourcePosition},
    durable_file::sync_folder,
    error::{Error, Result},
    fingerprint::fingerprint,
};
use serde::{Deserialize, Serialize};
use std::{
    fmt, fs,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The version of the folder's format that this code writes.
const FORMAT: u32 = 3;
/// The versions that it reads: version 2 has no slices of columns.
const READABLE: std::ops::RangeInclusive<u64> = 2..=3;
const STATE: &str = "state.json";

/// Identifies the model or the data that a checkpoint belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// For messages, e.g. "llama, 4 layers, hidden 192, 1.8 M parameters".
    pub summary: String,
    /// A hash that is equal for two models, or for two sets of data, if and only if a run of one can be resumed with
    /// the other.
    pub fingerprint: u64,
}

impl Identity {
    /// An identity with the fingerprint of a text.
    #[must_use]
    pub fn of_text(summary: String, text: &str) -> Self {
        Self { summary, fingerprint: fingerprint(text.bytes().map(u64::from)) }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:016x})", self.summary, self.fingerprint)
    }
}

/// The state of a run, without its tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Version of the format.
    pub format: u32,
    /// Steps done.
    pub step: u64,
    /// Position at which the next batch begins in the text, or in the first of several sources.
    pub position: PackerPosition,
    /// Positions at which it begins in each of several sources.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourcePosition>,
    /// The seed of all random draws.
    pub seed: u64,
    /// Tokens seen so far.
    pub tokens: u64,
    /// Identity of the model's names and shapes.
    pub model: Identity,
    /// Identity of the tokenized data.
    pub data: Identity,
    /// The watchdog's statistics of the losses; empty in older checkpoints.
    #[serde(default)]
    pub losses: LossStatistics,
    /// The model's `config.json`, which says more than names and shapes. Null in older checkpoints.
    #[serde(default)]
    pub config: serde_json::Value,
    /// The token that ends a document or an answer; none in older checkpoints.
    #[serde(default)]
    pub end: Option<u32>,
}

impl Progress {
    /// The state of a run at `step`, in the current format.
    #[must_use]
    pub fn new(step: u64, position: PackerPosition, seed: u64, tokens: u64, model: Identity, data: Identity) -> Self {
        let (losses, config) = (LossStatistics::default(), serde_json::Value::Null);
        let sources = Vec::new();
        Self { format: FORMAT, step, position, sources, seed, tokens, model, data, losses, config, end: None }
    }

    /// Sets the position in each source of the data.
    #[must_use]
    pub fn with_sources(self, sources: Vec<SourcePosition>) -> Self {
        let position = sources.first().map_or(self.position, |source| source.position);
        // A single source is saved as its position alone, which older versions read, too.
        let sources = if sources.len() == 1 { Vec::new() } else { sources };
        Self { position, sources, ..self }
    }

    /// The position in each source of the data.
    #[must_use]
    pub fn source_positions(&self) -> Vec<SourcePosition> {
        match &self.sources[..] {
            [] => vec![SourcePosition { position: self.position, sequences: 0 }],
            sources => sources.to_vec(),
        }
    }

    /// Sets the watchdog's statistics of the losses.
    #[must_use]
    pub fn with_losses(self, losses: LossStatistics) -> Self {
        Self { losses, ..self }
    }

    /// Sets the model's `config.json`, and the token that ends a document or an answer.
    #[must_use]
    pub fn with_config(self, config: serde_json::Value, end: Option<u32>) -> Self {
        Self { config, end, ..self }
    }
}

/// The content of `state.json`.
#[derive(Debug, Serialize, Deserialize)]
struct StateFile {
    #[serde(flatten)]
    progress: Progress,
    /// Names and sizes in bytes of the other files.
    files: Vec<(String, u64)>,
}

/// A checkpoint that a run can go on from.
#[derive(Debug)]
pub struct Checkpoint {
    /// The folder of the checkpoint.
    pub path: PathBuf,
    /// Step, data position, identities.
    pub progress: Progress,
    /// Parameters under their names, and optimiser state under `<kind>.<name>`.
    pub tensors: Tensors,
}

/// The checkpoints of one run: `OUT/checkpoints`.
#[derive(Clone)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
    storage: Arc<dyn Storage>,
}

/// A checkpoint that ranks are writing. It is removed unless it is committed.
#[derive(Debug)]
pub struct PendingCheckpoint {
    step: u64,
    folder: PathBuf,
    committed: bool,
}

impl Drop for PendingCheckpoint {
    fn drop(&mut self) {
        if !self.committed {
            // A failure is ignored: the next save removes the folder.
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

impl Checkpoints {
    /// The checkpoints below the run's folder `out`, of which the newest `keep` stay (at least one).
    #[must_use]
    pub fn new(out: &Path, keep: usize) -> Self {
        Self::on(out, keep, Arc::new(Disk))
    }

    /// Like [`Self::new`], written through `storage`.
    #[must_use]
    pub fn on(out: &Path, keep: usize, storage: Arc<dyn Storage>) -> Self {
        Self { folder: out.join("checkpoints"), keep: keep.max(1), storage }
    }

    fn part_folder(&self, step: u64) -> PathBuf {
        self.folder.join(format!(".step-{step:06}.part"))
    }

    /// The folder of a checkpoint while another one of its step is renamed to its place.
    fn replaced(&self, step: u64) -> PathBuf {
        self.folder.join(format!(".step-{step:06}.replaced"))
    }

    /// Creates the folder into which ranks write the checkpoint of a step. One rank does this, before any rank writes.
    ///
    /// # Errors
    /// [`Error::Io`] naming the folder and the system's message.
    pub fn begin(&self, step: u64) -> Result<PendingCheckpoint> {
        fs::create_dir_all(&self.folder).map_err(Error::io("create", &self.folder))?;
        let pending = PendingCheckpoint { step, folder: self.part_folder(step), committed: false };
        remove_if_there(&pending.folder)?;
        fs::create_dir(&pending.folder).map_err(Error::io("create", &pending.folder))?;
        Ok(pending)
    }

    /// Writes the slices of one of `ranks` ranks, after [`begin`](Self::begin).
    ///
    /// # Errors
    /// [`Error::Io`] naming the file and the system's message.
    pub fn write(&self, step: u64, rank: usize, ranks: usize, slices: &[Slice]) -> Result<()> {
        tensors::write(&*self.storage, &self.part_folder(step).join(file_name(rank, ranks)), slices)
    }

    /// Commits the checkpoint when all ranks have written, and removes the oldest ones. The rank that began does this.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file and the system's message; then nothing of this checkpoint remains and every other one
    /// is as it was.
    pub fn commit(&self, mut pending: PendingCheckpoint, progress: &Progress, ranks: usize) -> Result<PathBuf> {
        let size = |rank| {
            let name = file_name(rank, ranks);
            let path = pending.folder.join(&name);
            Ok((name, fs::metadata(&path).map_err(Error::io("read", &path))?.len()))
        };
        let state = StateFile { progress: progress.clone(), files: (0..ranks).map(size).collect::<Result<_>>()? };
        let json = serde_json::to_vec_pretty(&state)
            .map_err(|e| Error::Checkpoint { path: pending.folder.join(STATE), problem: e.to_string() })?;
        write_through(&*self.storage, &pending.folder.join(STATE), &json)?;
        sync_folder(&pending.folder);
        let path = self.folder.join(format!("step-{:06}", pending.step));
        // A run resumed from an older checkpoint may save a step again, and a folder cannot be renamed over a full one.
        let before = self.replaced(pending.step);
        if path.exists() {
            remove_if_there(&before)?;
            fs::rename(&path, &before).map_err(Error::io("rename", &path))?;
        }
        if let Err(error) = fs::rename(&pending.folder, &path) {
            // The name is free: the older checkpoint is renamed back, if that is possible.
            let _ = fs::rename(&before, &path);
            return Err(Error::io("rename", &pending.folder)(error));
        }
        pending.committed = true;
        sync_folder(&self.folder);
        remove_if_there(&before)?;
        self.prune()?;
        Ok(path)
    }

    /// Steps of the existing checkpoints, rising.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        // A checkpoint that was about to be replaced when the run was killed is still good.
        let step = |name: &String| match name.strip_prefix("step-") {
            Some(step) => step.parse().ok(),
            None => name.strip_prefix(".step-")?.strip_suffix(".replaced")?.parse().ok(),
        };
        let mut steps: Vec<u64> = self.entries()?.iter().filter_map(step).collect();
        steps.sort_unstable();
        steps.dedup();
        Ok(steps)
    }

    /// The folder of the checkpoint of a step.
    fn path(&self, step: u64) -> PathBuf {
        let path = self.folder.join(format!("step-{step:06}"));
        if path.exists() { path } else { self.replaced(step) }
    }

    fn entries(&self) -> Result<Vec<String>> {
        if !self.folder.exists() {
            return Ok(Vec::new());
        }
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(Error::io("read", &self.folder))? {
            let entry = entry.map_err(Error::io("read", &self.folder))?;
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        Ok(names)
    }

    fn prune(&self) -> Result<()> {
        let steps = self.steps()?;
        for step in &steps[..steps.len().saturating_sub(self.keep)] {
            remove_if_there(&self.folder.join(format!("step-{step:06}")))?;
            remove_if_there(&self.replaced(*step))?;
        }
        for name in self.entries()?.iter().filter(|n| n.starts_with(".step-") && n.ends_with(".part")) {
            remove_if_there(&self.folder.join(name))?;
        }
        Ok(())
    }

    /// Reads the newest checkpoint, which must be of this model and this data.
    ///
    /// # Errors
    /// As [`for_model`](Self::for_model), and for a checkpoint of other data.
    pub fn newest(&self, model: &Identity, data: &Identity) -> Result<Checkpoint> {
        let checkpoint = self.for_model(None, model)?;
        if checkpoint.progress.data.fingerprint != data.fingerprint {
            let advice =
                "a run goes on only over the same text; to train its model on new text, start one with --model";
            return Err(other(&checkpoint.path, "data", &checkpoint.progress.data, data, advice));
        }
        Ok(checkpoint)
    }

    /// Reads the checkpoint of a step, or the newest, which must be of this model.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] when there is none, it is damaged, of another format, or of another model.
    pub fn for_model(&self, step: Option<u64>, model: &Identity) -> Result<Checkpoint> {
        let steps = self.steps()?;
        let refuse = |problem: String| Err(Error::Checkpoint { path: self.folder.clone(), problem });
        let found = match step {
            None => steps.last(),
            Some(step) => steps.iter().find(|there| **there == step),
        };
        let Some(&step) = found else {
            let there: Vec<String> = steps.iter().map(u64::to_string).collect();
            return refuse(match step {
                Some(step) if !steps.is_empty() => {
                    format!("there is no checkpoint of step {step}; there are those of steps {}", there.join(", "))
                }
                _ => "there is no checkpoint to resume from".into(),
            });
        };
        let path = self.path(step);
        let StateFile { progress, files } = read_state(&path)?;
        if progress.model.fingerprint != model.fingerprint {
            return Err(other(&path, "model", &progress.model, model, "resume with the model it was made with"));
        }
        for (name, expected) in &files {
            let file = path.join(name);
            let actual = fs::metadata(&file).map_err(Error::io("read", &file))?.len();
            if actual != *expected {
                let problem = format!("damaged or cut short: {actual} bytes on disk, {expected} were written");
                return Err(Error::Checkpoint { path: file, problem });
            }
        }
        let tensors = Tensors::open(files.into_iter().map(|(name, _)| path.join(name)).collect())?;
        Ok(Checkpoint { path, progress, tensors })
    }
}

fn other(path: &Path, what: &str, saved: &Identity, here: &Identity, advice: &str) -> Error {
    let problem = format!("it belongs to another {what}: saved with {}; now {}; {advice}", saved.summary, here.summary);
    Error::Checkpoint { path: path.to_owned(), problem }
}

/// The name of the file of one of `ranks` ranks.
fn file_name(rank: usize, ranks: usize) -> String {
    format!("shard-{:05}-of-{ranks:05}.safetensors", rank + 1)
}

fn read_state(folder: &Path) -> Result<StateFile> {
    let path = folder.join(STATE);
    let bytes = fs::read(&path).map_err(Error::io("read", &path))?;
    let damaged = |problem| Error::Checkpoint { path: path.clone(), problem };
    let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| damaged(format!("damaged: {e}")))?;
    // This is checked before the fields are read: another format may have other fields.
    match value.get("format").and_then(serde_json::Value::as_u64) {
        Some(format) if READABLE.contains(&format) => {}
        Some(format) => {
            let (first, last) = (READABLE.start(), READABLE.end());
            return Err(damaged(format!("has format {format}; this version reads formats {first} to {last}")));
        }
        None => return Err(damaged("damaged: no format number".into())),
    }
    serde_json::from_value(value).map_err(|e| damaged(format!("damaged: {e}")))
}

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path)(e)),
        _ => Ok(()),
    }
}

fn write_through(storage: &dyn Storage, path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = storage.create(path).map_err(Error::io("write", path))?;
    file.write_all(bytes).and_then(|()| file.sync()).map_err(Error::io("write", path))
}

#[cfg(test)]
mod test;
