//! When a request was queued, when its prefill began, and when its first token came.

use super::histogram::EngineHistograms;
use std::time::Instant;

/// The times of a request, as far as it has come.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestTimes {
    queued: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
}

impl RequestTimes {
    pub(super) fn new(queued: Instant) -> Self {
        Self { queued, started: None, first_token: None }
    }

    /// The request is in a step for the first time; if it is preempted, what it waits later counts as running.
    pub(super) fn start(&mut self) {
        self.started.get_or_insert_with(Instant::now);
    }

    /// A token was drawn.
    pub(super) fn token(&mut self) {
        self.first_token.get_or_insert_with(Instant::now);
    }

    /// Counts the phases of a request that ends now. A request without a token was prefilled all the time.
    pub(super) fn end(&self, histograms: &mut EngineHistograms) {
        let Some(started) = self.started else { return };
        let ended = Instant::now();
        let first_token = self.first_token.unwrap_or(ended);
        let seconds = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64();
        histograms.queue_time.observe(seconds(self.queued, started));
        histograms.prefill_time.observe(seconds(started, first_token));
        histograms.decode_time.observe(seconds(first_token, ended));
        histograms.inference_time.observe(seconds(started, ended));
    }
}
