//! Histograms of what the engine measures: the phases of requests, and the tokens of steps.

/// Bounds of times in seconds: those of vLLM, so that rules about its buckets hold here, and smaller ones for small models.
const SECONDS: [f64; 28] = [
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
    50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];

/// Bounds of the tokens of a step, as in vLLM.
const TOKENS: [f64; 13] = [1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];

/// Observations, counted in buckets.
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    bounds: &'static [f64],
    /// The observations of each bucket; the last one has no bound.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    /// Counts a value in the first bucket whose bound is not below it.
    pub fn observe(&mut self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket] += 1;
        self.sum += value;
    }

    /// The sum of all observations.
    #[must_use]
    pub fn sum(&self) -> f64 {
        self.sum
    }

    /// The number of observations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The largest value of each bucket, infinity for the last, and the number of observations in that bucket alone.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> {
        self.bounds.iter().copied().chain([f64::INFINITY]).zip(self.counts.iter().copied())
    }
}

/// The histograms of an engine. Requests count when they end, by their success, a failure, or the departure of their client.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineHistograms {
    /// Seconds from the arrival of a request until its prefill begins.
    pub queue_time: Histogram,
    /// Seconds from there until its first token.
    pub prefill_time: Histogram,
    /// Seconds from its first token until its end.
    pub decode_time: Histogram,
    /// Seconds from the beginning of its prefill until its end.
    pub inference_time: Histogram,
    /// Tokens of a step: those of prompts that it read, and those that it generated.
    pub step_tokens: Histogram,
}

impl Default for EngineHistograms {
    fn default() -> Self {
        let seconds = || Histogram::new(&SECONDS);
        Self {
            queue_time: seconds(),
            prefill_time: seconds(),
            decode_time: seconds(),
            inference_time: seconds(),
            step_tokens: Histogram::new(&TOKENS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_count_up_to_the_bound_of_their_bucket() {
        let mut histogram = Histogram::new(&[1.0, 8.0]);
        [0.0, 1.0, 1.5, 8.0, 9.0].into_iter().for_each(|value| histogram.observe(value));
        assert_eq!(histogram.buckets().collect::<Vec<_>>(), [(1.0, 2), (8.0, 2), (f64::INFINITY, 1)]);
        assert_eq!((histogram.count(), histogram.sum()), (5, 19.5));
    }

    #[test]
    fn bounds_ascend() {
        assert!(SECONDS.is_sorted() && TOKENS.is_sorted());
    }
}
