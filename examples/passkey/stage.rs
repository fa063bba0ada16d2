//! One length of the curriculum: its texts, and the training that starts from the model of the stage before.

use crate::attention_reach::{AttentionReach, RANKS};
use crate::document;
use anyhow::{Result, ensure};
use ringspan_train::{Observer, Settings, StepMetrics, TrainArgs, TrainConfig, train};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// A stage of training with texts of one length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stage {
    /// Number of tokens in a text.
    pub(crate) length: usize,
    /// Number of texts in a step.
    pub(crate) texts: usize,
    /// Number of steps.
    pub(crate) steps: u64,
    /// Highest learning rate.
    pub(crate) lr: f64,
    /// Scaling of the rotary embedding of the previous stage's model; a model can be scaled once only.
    pub(crate) rope_scaling: Option<&'static str>,
}

impl Stage {
    /// The file of its texts, in the folder of a run.
    pub(crate) fn data(&self, out: &Path) -> PathBuf {
        out.join(format!("data/{}.jsonl", self.length))
    }

    /// Writes as many texts as its steps take, and those that the trainer holds out, so that no text is seen twice.
    pub(crate) fn write_data(&self, out: &Path, seed: u64) -> Result<()> {
        let taken = self.texts * self.steps as usize;
        document::write(&self.data(out), &document::documents(self.length, taken + taken / 8 + 4, seed)?)
    }

    /// Trains the model in `from`, with needles and questions on different ranks; returns the loss of each step, and the new
    /// model's folder.
    pub(crate) fn train(
        &self,
        out: &Path,
        from: &Path,
        reach: AttentionReach,
        seed: u64,
    ) -> Result<(Vec<f64>, PathBuf)> {
        // With the ring, a sequence is as long as a text, and is one document. In the control, a sequence is half as long and
        // ends where the first rank's part does: the second half of a text becomes the next sequence, a document of its own.
        let parts = reach.documents(self.length);
        let new = out.join(format!("{}-{}", reach.name(), self.length));
        let settings = Settings {
            model: Some(from.into()),
            data: Some(vec![self.data(out)]),
            out: Some(new.clone()),
            token_cache: Some(out.join("tokens")),
            sequence_length: Some(self.length / parts),
            // The control learns from both halves of a text, each as a text of its own.
            overlong: Some("split".into()),
            batch_size: Some(self.texts * parts),
            ring: Some(RANKS),
            layout: Some("contiguous".into()),
            steps: Some(self.steps),
            lr: Some(self.lr),
            rope_scaling: self.rope_scaling.map(str::to_owned),
            seed: Some(seed),
            save_every: Some(0),
            eval_tokens: Some(2 * self.length),
            sample_tokens: Some(0),
            ..Settings::default()
        };
        let config = TrainConfig::from_args(&TrainArgs { settings, ..TrainArgs::default() })?;
        let mut progress = Progress::new(reach, *self);
        let outcome = train(&config, &AtomicBool::new(false), &mut progress)?;
        ensure!(!outcome.interrupted, "training ended after step {} of {}", outcome.step, outcome.steps);
        Ok((progress.losses, new))
    }
}

/// Prints a line now and then, and records the losses.
struct Progress {
    title: String,
    steps: u64,
    losses: Vec<f64>,
    told: Instant,
}

const BETWEEN_LINES: Duration = Duration::from_secs(10);

impl Progress {
    fn new(reach: AttentionReach, stage: Stage) -> Self {
        let title = format!("{}, {} x {} tokens", reach.name(), stage.texts, stage.length);
        Self { title, steps: stage.steps, losses: Vec::new(), told: Instant::now() }
    }
}

impl Observer for Progress {
    fn stepped(&mut self, step: &StepMetrics) {
        self.losses.push(step.loss);
        if step.step == self.steps || self.told.elapsed() > BETWEEN_LINES {
            self.told = Instant::now();
            println!("{}: step {}/{}, loss {:.4}", self.title, step.step, self.steps, step.loss);
        }
    }
}
