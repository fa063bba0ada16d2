//! Observers of a training: a terminal, a log, a test.

use crate::{
    human_readable::{duration_text, grouped},
    metrics::{EvaluationMetrics, StepMetrics},
    plan::Plan,
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{
    io::IsTerminal,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Receives the events of a training, in order, from one thread at a time.
pub trait Observer: Send {
    /// Text of `source` is being tokenized: `done` of the `bytes` of its files are read. Called before
    /// [`planned`](Self::planned), many times a second, for one source after the other.
    fn tokenizing(&mut self, source: &Path, done: u64, bytes: u64) {
        let _ = (source, done, bytes);
    }
    /// The plan of the run is made. Called once, before any step.
    fn planned(&mut self, plan: &Plan) {
        let _ = plan;
    }
    /// Ranks that are processes have found out how blocks travel between their GPUs, as `block_transport` says. Called before any step.
    fn connected(&mut self, block_transport: &str) {
        let _ = block_transport;
    }
    /// A step is done, and its line is in the metrics file.
    fn stepped(&mut self, metrics: &StepMetrics) {
        let _ = metrics;
    }
    /// The model was evaluated on the held-out text.
    fn evaluated(&mut self, metrics: &EvaluationMetrics) {
        let _ = metrics;
    }
    /// A checkpoint is on the disk.
    fn saved(&mut self, step: u64, path: &Path) {
        let _ = (step, path);
    }
}

/// An observer that ignores all events.
#[derive(Debug, Clone, Copy, Default)]
pub struct SilentObserver;

impl Observer for SilentObserver {}

/// Time between plain lines, so that a log of hours stays readable.
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);

/// Writes to standard error: a progress bar where it is a terminal, plain lines where it is not.
pub struct TerminalObserver {
    bar: Option<ProgressBar>,
    tokenization: Option<TokenizationProgress>,
    steps: u64,
    first: Option<u64>,
    last_line: Option<Instant>,
    began: Instant,
}

impl TerminalObserver {
    /// Checks whether standard error is a terminal.
    #[must_use]
    pub fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("step {pos}/{len} [{bar:32}] {msg}, {prefix} left");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
            bar.set_prefix("?");
            bar
        });
        Self { bar, tokenization: None, steps: 0, first: None, last_line: None, began: Instant::now() }
    }

    /// Removes the progress bar of tokenization, so that lines about steps can follow.
    fn end_tokenization(&mut self) {
        if let Some(TokenizationProgress { bar: Some(bar), .. }) = self.tokenization.take() {
            bar.finish_and_clear();
        }
    }

    fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    /// Time that the remaining steps take at the pace so far, in words.
    fn time_left(&mut self, step: u64) -> String {
        let first = *self.first.get_or_insert(step.saturating_sub(1));
        let done = step.saturating_sub(first).max(1);
        let each = self.began.elapsed().as_secs_f64() / done as f64;
        duration_text(each * self.steps.saturating_sub(step) as f64)
    }
}

/// Progress of a source that is being tokenized.
struct TokenizationProgress {
    source: PathBuf,
    bar: Option<ProgressBar>,
    began: Instant,
    last_line: Instant,
}

impl TokenizationProgress {
    fn new(source: &Path, in_terminal: bool) -> Self {
        let bar = in_terminal.then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{prefix} becomes tokens [{bar:32}] {percent}%, {msg} left");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
            bar.set_prefix(source.display().to_string());
            bar.set_message("?");
            bar
        });
        let now = Instant::now();
        Self { source: source.into(), bar, began: now, last_line: now }
    }

    fn report(&mut self, done: u64, bytes: u64) {
        let left = match done {
            0 => "?".into(),
            _ => duration_text(self.began.elapsed().as_secs_f64() * bytes.saturating_sub(done) as f64 / done as f64),
        };
        if let Some(bar) = &self.bar {
            bar.set_length(bytes);
            bar.set_position(done);
            bar.set_message(left);
        } else if self.last_line.elapsed() >= PLAIN_INTERVAL {
            self.last_line = Instant::now();
            let percent = 100.0 * done as f64 / bytes.max(1) as f64;
            eprintln!("{} becomes tokens: {percent:.0}%, {left} left", self.source.display());
        }
    }
}

impl Default for TerminalObserver {
    fn default() -> Self {
        Self::new()
    }
}

impl Observer for TerminalObserver {
    fn tokenizing(&mut self, source: &Path, done: u64, bytes: u64) {
        if self.tokenization.as_ref().is_none_or(|progress| progress.source != source) {
            self.end_tokenization();
            self.tokenization = Some(TokenizationProgress::new(source, self.bar.is_some()));
        }
        if let Some(progress) = &mut self.tokenization {
            progress.report(done, bytes);
        }
    }

    fn planned(&mut self, plan: &Plan) {
        self.end_tokenization();
        self.line(&plan.to_string());
        self.steps = plan.steps;
        self.began = Instant::now();
        if let Some(bar) = &self.bar {
            bar.set_length(plan.steps);
            bar.set_position(plan.first_step);
        }
    }

    fn connected(&mut self, block_transport: &str) {
        self.line(block_transport);
    }

    fn stepped(&mut self, m: &StepMetrics) {
        let left = self.time_left(m.step);
        let speed = grouped(m.tokens_per_second.round() as u64);
        let share = m.peak_share.map_or_else(String::new, |share| format!("{:.0}% of peak, ", 100.0 * share));
        let text = format!("loss {:.4}, {speed} tokens/s ({share}{:.0}% waiting)", m.loss, 100.0 * m.waited);
        if let Some(bar) = &self.bar {
            bar.set_position(m.step);
            bar.set_message(text);
            bar.set_prefix(left);
            if m.step == self.steps {
                bar.finish();
            }
            return;
        }
        let is_due = self.last_line.is_none_or(|last| last.elapsed() >= PLAIN_INTERVAL);
        if is_due || m.step == self.steps {
            self.last_line = Some(Instant::now());
            eprintln!("step {}/{}: {text}, {left} left", m.step, self.steps);
        }
    }

    fn evaluated(&mut self, m: &EvaluationMetrics) {
        self.line(&format!(
            "held-out text after step {}: loss {:.4}, perplexity {:.3} over {} tokens",
            m.step,
            m.held_out_loss,
            m.held_out_perplexity,
            grouped(m.held_out_targets)
        ));
    }

    fn saved(&mut self, _: u64, path: &Path) {
        if self.bar.is_none() {
            eprintln!("saved {}", path.display());
        }
    }
}
