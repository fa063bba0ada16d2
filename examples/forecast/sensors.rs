//! Readings of sensors that follow each other.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Number of sensors.
pub(crate) const SENSORS: usize = 3;

/// `count` readings of all sensors, one after the other, `[count, SENSORS]`.
///
/// The first two are waves of other periods and phases in each series. The third is their product, [`DELAY`] readings later.
pub(crate) fn series(count: usize, seed: u64) -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut uniform = |from: f64, to: f64| from + (to - from) * f64::from(random.next_u32()) / f64::from(u32::MAX);
    let [first, second] = [[12.0, 20.0], [30.0, 50.0]].map(|[from, to]| {
        let (period, phase) = (uniform(from, to), uniform(0.0, 1.0));
        move |time: f64| (std::f64::consts::TAU * (time / period + phase)).sin()
    });
    let reading = |time: usize| {
        let (time, before) = (time as f64, time as f64 - DELAY);
        [first(time), second(time), first(before) * second(before)]
    };
    (0..count).flat_map(reading).map(|value| value as f32).collect()
}

/// By how many readings the third sensor follows the others.
const DELAY: f64 = 7.0;

/// The mean squared error of a forecast that repeats the last reading.
pub(crate) fn error_of_repeating(readings: &[f32]) -> f32 {
    let errors = readings.iter().zip(&readings[SENSORS..]).map(|(last, next)| (next - last).powi(2));
    errors.sum::<f32>() / (readings.len() - SENSORS) as f32
}
