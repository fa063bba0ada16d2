//! The progress of a run: a bar where standard error is a terminal, plain lines where it is not.

use crate::duration_text::duration_text;
use crate::output;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time between plain lines.
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);

pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    steps: usize,
    /// Steps that were done before.
    first: usize,
    /// Floating-point operations of all steps, if they have been counted.
    operations: Option<f64>,
    began: Instant,
    last_line: Mutex<Option<Instant>>,
}

impl Progress {
    /// The progress of so many steps with so many floating-point operations, if these are known.
    pub(crate) fn new(steps: usize, operations: Option<f64>) -> Self {
        Self { operations, ..Self::after(0, steps) }
    }

    /// The progress of a run that goes on after `first` of its steps.
    pub(crate) fn after(first: usize, steps: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("step {pos}/{len} [{bar:32}] {msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
            bar.set_message("?");
            bar
        });
        Self { bar, steps, first, operations: None, began: Instant::now(), last_line: Mutex::new(None) }
    }

    /// Says that so many steps have been taken.
    pub(crate) fn stepped(&self, step: usize) {
        self.stepped_with(step, "");
    }

    /// Like [`stepped`](Self::stepped), with words about the step before the time that is left.
    pub(crate) fn stepped_with(&self, step: usize, words: &str) {
        let each = self.began.elapsed().as_secs_f64() / step.saturating_sub(self.first).max(1) as f64;
        let left = (each * self.steps.saturating_sub(step) as f64).round() as u64;
        let left = duration_text(left);
        let rate = |operations: f64| operations / self.steps.max(1) as f64 / each.max(1e-9) / 1e9;
        let rate = self.operations.map_or(String::new(), |operations| format!(", {:.1} GFLOP/s", rate(operations)));
        let left = format!("{left} left{rate}");
        if let Some(bar) = &self.bar {
            bar.set_position(step as u64);
            bar.set_message(format!("{words}{left}"));
            if step == self.steps {
                bar.finish();
            }
            return;
        }
        let mut last = self.last_line.lock().unwrap_or_else(PoisonError::into_inner);
        if step == self.steps || last.is_none_or(|last| last.elapsed() >= PLAIN_INTERVAL) {
            *last = Some(Instant::now());
            output::note(format!("step {step}/{}, {words}{left}", self.steps));
        }
    }
}
