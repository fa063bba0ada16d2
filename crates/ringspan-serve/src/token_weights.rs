//! Weights of all tokens of a vocabulary.

use ringspan_candle::activation::exp;
use ringspan_candle::pool;

/// Number of tokens whose weights are summed and drawn from together.
const CHUNK: usize = 1024;
/// Number of sums that run side by side, so that they become vector instructions.
const LANES: usize = 8;

/// The weights `e^((logit - max) / temperature)` of all tokens, where max is the greatest logit. Sums and draws compute them in f32 by
/// vector instructions, with a relative error of at most 4e-6, and add them in f64.
pub(crate) struct TokenWeights<'a> {
    logits: &'a [f32],
    max: f64,
    /// Reciprocal of the temperature.
    factor: f64,
}

impl<'a> TokenWeights<'a> {
    /// The weights at a temperature above 0 of logits `[V]`, whose greatest is `max`.
    pub(crate) fn new(logits: &'a [f32], max: f32, temperature: f32) -> Self {
        Self { logits, max: f64::from(max), factor: 1.0 / f64::from(temperature) }
    }

    /// The weight of a token, in f64.
    pub(crate) fn of(&self, token: usize) -> f64 {
        ((f64::from(self.logits[token]) - self.max) * self.factor).exp()
    }

    /// The sum of all weights; NaN if a logit or `max` is NaN, or `max` is infinite.
    pub(crate) fn total(&self) -> f64 {
        self.sums().iter().sum()
    }

    /// The token at which the sum of the weights, in the order of the tokens, exceeds `share` of their total; `None` if there is no weight.
    pub(crate) fn token_at(&self, share: f64) -> Option<usize> {
        let sums = self.sums();
        let (chunk, rest) = index_at(sums.iter().copied(), share * sums.iter().sum::<f64>())?;
        let (first, mut weights) = (chunk * CHUNK, [0.0; CHUNK]);
        self.of_chunk(&self.logits[first..self.logits.len().min(first + CHUNK)], &mut weights);
        index_at(weights.into_iter().map(f64::from), rest).map(|(index, _)| first + index)
    }

    /// The sums of the weights of each [`CHUNK`] tokens.
    fn sums(&self) -> Vec<f64> {
        let of_chunk = |logits: &[f32]| {
            let mut weights = [0.0; CHUNK];
            self.of_chunk(logits, &mut weights)
        };
        self.logits.chunks(CHUNK).map(of_chunk).collect()
    }

    /// Writes the weights of at most [`CHUNK`] tokens, and returns their sum. Weights behind them must be 0.
    fn of_chunk(&self, logits: &[f32], weights: &mut [f32; CHUNK]) -> f64 {
        pool::vectorized(
            #[inline(always)]
            || {
                for (weight, logit) in weights.iter_mut().zip(logits) {
                    *weight = exp(((f64::from(*logit) - self.max) * self.factor) as f32);
                }
                let mut sums = [0.0; LANES];
                for weights in weights.as_chunks::<LANES>().0 {
                    for (sum, weight) in sums.iter_mut().zip(weights) {
                        *sum += f64::from(*weight);
                    }
                }
                sums.iter().sum()
            },
        )
    }
}

/// The index at which the sum of the weights exceeds `sum`, and what `sum` exceeds the weights before it by. Rounding may leave a small
/// rest behind all weights; then it is the last index with any weight.
pub(crate) fn index_at(weights: impl Iterator<Item = f64>, sum: f64) -> Option<(usize, f64)> {
    let (mut found, mut rest) = (None, sum);
    for (index, weight) in weights.enumerate().filter(|(_, weight)| *weight > 0.0) {
        found = Some((index, rest));
        rest -= weight;
        if rest < 0.0 {
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(logits: &[f32], max: f32, temperature: f32) -> Vec<f64> {
        logits.iter().map(|logit| ((f64::from(*logit) - f64::from(max)) / f64::from(temperature)).exp()).collect()
    }

    #[test]
    fn totals_are_those_of_f64_for_any_number_of_tokens() {
        for tokens in [1, 2, 7, 1023, 1024, 1025, 5000] {
            for temperature in [0.1, 1.0, 30.0] {
                let logits: Vec<f32> = (0..tokens).map(|i| 20.0 * (0.7 * i as f32).sin()).collect();
                let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let wanted: f64 = plain(&logits, max, temperature).iter().sum();
                let total = TokenWeights::new(&logits, max, temperature).total();
                assert!((total / wanted - 1.0).abs() < 1e-6, "{tokens} tokens at {temperature}: {total}, {wanted}");
            }
        }
    }

    #[test]
    fn each_token_has_its_share() {
        let logits: Vec<f32> =
            (0..3000).map(|i| if i % 3 == 0 { f32::NEG_INFINITY } else { (i as f32).cos() }).collect();
        let weights = plain(&logits, 1.0, 0.7);
        let (total, drawn) = (weights.iter().sum::<f64>(), TokenWeights::new(&logits, 1.0, 0.7));
        let mut below = 0.0;
        for (token, weight) in weights.iter().enumerate() {
            if *weight > 0.0 {
                assert_eq!(drawn.token_at((below + 0.5 * weight) / total), Some(token));
            }
            below += weight;
        }
        assert_eq!(drawn.token_at(0.0), Some(1));
        assert_eq!(drawn.token_at(1.0), Some(2999));
        assert_eq!(TokenWeights::new(&[f32::NEG_INFINITY; 4], 0.0, 1.0).token_at(0.5), None);
    }
}
