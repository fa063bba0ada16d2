//! Log-probabilities of tokens.

use super::request::TokenLogprobs;
use crate::sampler::most_likely;
use crate::token_weights::TokenWeights;

/// The distribution of the next token, before penalties, bias and temperature.
pub(super) struct Distribution<'a> {
    logits: &'a [f32],
    max: f32,
    /// Natural logarithm of the sum of all exponentials.
    log_total: f32,
}

impl<'a> Distribution<'a> {
    /// The distribution with these logits `[V]`.
    pub(super) fn new(logits: &'a [f32]) -> Self {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total = TokenWeights::new(logits, max, 1.0).total();
        Self { logits, max, log_total: (f64::from(max) + total.ln()) as f32 }
    }

    /// The `n` most likely tokens with their log-probabilities, in descending order.
    fn top(&self, n: usize) -> Vec<(u32, f32)> {
        if n == 0 {
            return Vec::new();
        }
        let tokens = most_likely(self.logits, self.max, 1.0, n);
        tokens.iter().take(n).map(|token| (*token as u32, self.logits[*token] - self.log_total)).collect()
    }

    /// The log-probability of `token`, and the `n` most likely tokens.
    pub(super) fn of(&self, token: u32, n: usize) -> TokenLogprobs {
        let logprob = self.logits.get(token as usize).map_or(f32::NEG_INFINITY, |logit| logit - self.log_total);
        TokenLogprobs { token, logprob, top: self.top(n) }
    }
}
