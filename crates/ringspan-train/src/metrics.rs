//! The metrics of a run, one JSON object per line.

use crate::{
    durable_file::write_file,
    error::{Error, Result},
    events::EventFile,
};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

/// The metrics of one training step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Steps done, this one included: the first is 1.
    pub step: u64,
    /// Mean negative log-likelihood per target, in nats, over all ranks and micro-batches; includes the router's auxiliary
    /// (load-balancing) loss where the configuration of a mixture of experts asks for it.
    pub loss: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// L2 norm of all gradients before clipping.
    pub grad_norm: f64,
    /// Tokens seen since the beginning of the run.
    pub tokens: u64,
    /// Tokens of this step per second of this step.
    pub tokens_per_second: f64,
    /// Floating-point operations of the model per second, as a share of the rate that the ranks together reach in matrix
    /// products, measured when training began in the type in which the model computes. Ranks on one GPU share its rate.
    /// Recomputation is not counted. Lines of older runs on GPUs lack this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_share: Option<f64>,
    /// Share of the step that the rank that waited most spent waiting for others: for transfers that no computation hid, and for
    /// ranks that were late.
    pub waited: f64,
    /// Visible query-key pairs of the rank with most of them, over the mean of all ranks: 1 is even.
    pub attention_imbalance: f64,
    /// Most bytes that the process of rank 0 has had in memory (peak resident set), where the system tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_memory: Option<u64>,
    /// Most bytes that this process has had allocated at once since its plan was made, where its allocator counts them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_allocated: Option<u64>,
    /// Most bytes that this process has had in use at once on its fullest GPU since training began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_gpu_memory: Option<u64>,
    /// Seconds since this process began training.
    pub seconds: f64,
}

/// The metrics of one evaluation on the held-out text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvaluationMetrics {
    /// Steps done.
    pub step: u64,
    /// Mean negative log-likelihood per held-out target, in nats, over all ranks.
    pub held_out_loss: f64,
    /// `exp` of the loss.
    pub held_out_perplexity: f64,
    /// Number of targets that the loss is the mean of.
    pub held_out_targets: u64,
}

/// An open `metrics.jsonl`.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
    events: Option<EventFile>,
}

#[derive(Deserialize)]
struct LineStep {
    step: u64,
}

impl MetricsFile {
    /// Opens `path` to go on after `step`: lines of later steps, and a last line cut short by a crash, are removed. With
    /// `step` 0 the file starts empty.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(path: &Path, step: u64) -> Result<Self> {
        let before = match fs::read_to_string(path) {
            Ok(text) if step > 0 => text,
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("read", path)(e)),
            _ => String::new(),
        };
        let kept: String = before
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n') && serde_json::from_str(line).is_ok_and(|l: LineStep| l.step <= step))
            .collect();
        write_file(path, kept.as_bytes())?;
        let file = OpenOptions::new().append(true).open(path).map_err(Error::io("write", path))?;
        Ok(Self { path: path.into(), file, events: None })
    }

    /// This file, which also writes every number of a line to an event file.
    #[must_use]
    pub fn with_events(self, events: EventFile) -> Self {
        Self { events: Some(events), ..self }
    }

    /// Appends a line. It is handed to the operating system at once, so `tail -f` is up to date.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let failed = |e: serde_json::Error| Error::io("write", &self.path)(e.into());
        let mut text = serde_json::to_string(line).map_err(failed)?;
        text.push('\n');
        self.file.write_all(text.as_bytes()).map_err(Error::io("write", &self.path))?;
        let Some(events) = &mut self.events else { return Ok(()) };
        let values: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).map_err(failed)?;
        let step = values.get("step").and_then(serde_json::Value::as_u64).unwrap_or(0);
        let numbers = values.iter().filter(|(name, _)| *name != "step");
        events.append(step, numbers.filter_map(|(name, value)| Some((name.as_str(), value.as_f64()?))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            loss: 0.1 + 0.2,
            lr: 1e-3,
            grad_norm: 1.0,
            tokens: 8,
            tokens_per_second: 4.0,
            peak_share: Some(0.5),
            waited: 0.1,
            attention_imbalance: 1.0,
            peak_memory: None,
            peak_allocated: Some(5),
            peak_gpu_memory: Some(6),
            seconds: 2.0,
        }
    }

    #[test]
    fn every_number_of_a_line_is_an_event() {
        let folder = tempfile::tempdir().unwrap();
        let events = EventFile::create(&folder.path().join("events"), 0).unwrap();
        let mut file = MetricsFile::open(&folder.path().join("metrics.jsonl"), 0).unwrap().with_events(events);
        file.append(&step(7)).unwrap();
        let entry = fs::read_dir(folder.path().join("events")).unwrap().next().unwrap().unwrap();
        let bytes = fs::read(entry.path()).unwrap();
        let holds = |name: &str, number: f32| {
            let value = [&[name.len() as u8], name.as_bytes(), &[2 << 3 | 5], &number.to_le_bytes()].concat();
            bytes.windows(value.len()).any(|window| window == value)
        };
        for (name, number) in [("loss", 0.3), ("lr", 1e-3), ("grad_norm", 1.0), ("tokens", 8.0), ("seconds", 2.0)] {
            assert!(holds(name, number), "{name}");
        }
        assert!(!holds("step", 7.0));
    }

    #[test]
    fn a_resumed_run_cuts_what_came_after_its_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsFile::open(&path, 0).unwrap();
        for i in 1..=5 {
            file.append(&step(i)).unwrap();
        }
        let evaluation =
            EvaluationMetrics { step: 3, held_out_loss: 1.0, held_out_perplexity: 1f64.exp(), held_out_targets: 7 };
        file.append(&evaluation).unwrap();
        file.file.write_all(b"{\"step\":3,\"lo").unwrap();
        let mut file = MetricsFile::open(&path, 3).unwrap();
        file.append(&step(4)).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let steps: Vec<u64> = text.lines().map(|l| serde_json::from_str::<LineStep>(l).unwrap().step).collect();
        assert_eq!(steps, [1, 2, 3, 3, 4]);
        // Losses come back bit for bit.
        assert_eq!(serde_json::from_str::<StepMetrics>(text.lines().next().unwrap()).unwrap(), step(1));
        MetricsFile::open(&path, 0).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
    }
}
