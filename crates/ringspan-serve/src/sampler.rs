//! Sampling of the next token from logits: temperature, then top-k, then top-p (the nucleus), then a random draw.

use crate::error::{Error, Result};
use crate::greatest_logit::GreatestLogit;
use crate::token_weights::{TokenWeights, index_at};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};

/// Settings for how tokens are drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 always takes the most likely token (the lowest id among equals).
    pub temperature: f32,
    /// Keeps only the K most likely tokens, exactly K also among equals (the lowest ids stay).
    pub top_k: Option<usize>,
    /// Keeps only the most likely tokens that together have at least this probability, counted after `top_k` on
    /// temperature-scaled probabilities; 0 keeps the single most likely token.
    pub top_p: Option<f32>,
    /// Seed of the random stream.
    pub seed: u64,
}

impl Sampling {
    /// Settings that always take the most likely token.
    pub const fn greedy() -> Self {
        Self { temperature: 0.0, top_k: None, top_p: None, seed: 0 }
    }

    /// Checks that every option is in its range and has an effect.
    ///
    /// # Errors
    /// The first option that is out of range or has no effect.
    pub fn check(&self) -> Result<()> {
        let wrong = |option, given: String, possible| Err(Error::InvalidOption { option, given, possible });
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return wrong("temperature", self.temperature.to_string(), "a finite number of at least 0");
        }
        if self.top_k == Some(0) {
            return wrong("top-k", "0".into(), "a number of at least 1; leave it out to keep all tokens");
        }
        if let Some(p) = self.top_p
            && !(0.0..=1.0).contains(&p)
        {
            return wrong("top-p", p.to_string(), "a probability from 0 to 1");
        }
        let filter = self.top_k.map(|k| ("top-k", k.to_string())).or(self.top_p.map(|p| ("top-p", p.to_string())));
        match filter {
            Some((option, given)) if self.temperature == 0.0 => wrong(
                option,
                given,
                "only a temperature above 0: with temperature 0 the most likely token is taken, so it has no effect",
            ),
            _ => Ok(()),
        }
    }
}

/// Draws tokens from a random stream with given settings.
///
/// ```
/// use ringspan_serve::{Sampler, Sampling};
///
/// let mut sampler = Sampler::new(Sampling::greedy())?;
/// assert_eq!(sampler.sample(&[0.1, 2.5, -1.0])?, 1);
/// # Ok::<_, ringspan_serve::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    random: ChaCha8Rng,
}

impl Sampler {
    /// A sampler at the start of its random stream.
    ///
    /// # Errors
    /// Options outside their range or without effect, see [`Sampling::check`].
    pub fn new(sampling: Sampling) -> Result<Self> {
        sampling.check()?;
        Ok(Self { sampling, random: ChaCha8Rng::seed_from_u64(sampling.seed) })
    }

    /// Draws the next token, given its logits `[V]`.
    ///
    /// # Errors
    /// An empty vocabulary, NaN or infinity among the logits, or all of them -inf.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        let Sampling { temperature, top_k, top_p, .. } = self.sampling;
        Filter { temperature, top_k, top_p, min_p: None }.draw(logits, &mut self.random)
    }
}

/// Which tokens may be drawn, and with which weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Filter {
    pub(crate) temperature: f32,
    pub(crate) top_k: Option<usize>,
    pub(crate) top_p: Option<f32>,
    /// Keeps tokens of what is left that are at least this share as likely as the most likely one.
    pub(crate) min_p: Option<f32>,
}

/// Number of tokens that are sorted first in search of the most likely ones that together have some probability.
const FIRST_SORTED: usize = 64;

impl Filter {
    /// Draws a token, given the logits `[V]`. At temperature 0 it takes nothing from the random stream.
    pub(crate) fn draw(&self, logits: &[f32], random: &mut ChaCha8Rng) -> Result<u32> {
        let best = argmax(logits)?;
        if self.temperature == 0.0 {
            return Ok(best as u32);
        }
        // 53 random bits: a uniform number in [0, 1).
        let uniform = (random.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64);
        let all = TokenWeights::new(logits, logits[best], self.temperature);
        let token = match self.candidates(logits, logits[best], &all) {
            None => all.token_at(uniform),
            Some(candidates) => {
                let weights = candidates.iter().map(|(_, weight)| *weight);
                let total: f64 = weights.clone().sum();
                index_at(weights, uniform * total).map(|(index, _)| candidates[index].0)
            }
        };
        Ok(token.unwrap_or(best) as u32)
    }

    /// The tokens that may be drawn, with their weights, of which the greatest is 1; `None` if all may be drawn.
    fn candidates(&self, logits: &[f32], max: f32, all: &TokenWeights) -> Option<Vec<(usize, f64)>> {
        let Self { temperature, top_k, top_p, min_p } = *self;
        let sum = |tokens: &[usize]| tokens.iter().map(|token| all.of(*token)).sum::<f64>();
        let top_p = top_p.filter(|p| *p < 1.0).map(f64::from);
        let min_p = min_p.filter(|share| *share > 0.0).map(f64::from);
        let (mut tokens, mut sorted, enough) = match (top_k, top_p, min_p) {
            (Some(k), ..) => {
                let mut tokens = most_likely(logits, max, temperature, k);
                tokens.truncate(k);
                let enough = top_p.map(|p| p * sum(&tokens));
                (tokens, k, enough)
            }
            (None, Some(p), _) => {
                let enough = p * all.total();
                (likely(logits, max, temperature, |tokens| sum(tokens) >= enough), 0, Some(enough))
            }
            // Half the share leaves room for rounding.
            (None, None, Some(share)) => {
                (at_least(logits, f64::from(max) + f64::from(temperature) * (share / 2.0).ln()), 0, None)
            }
            (None, None, None) => return None,
        };
        if let Some(enough) = enough {
            let (mut sum, mut kept) = (0.0, 0);
            while kept < tokens.len() && (kept == 0 || sum < enough) {
                if kept == sorted {
                    sorted = sort_first(&mut tokens, logits, sorted, (sorted * 8).max(FIRST_SORTED));
                }
                sum += all.of(tokens[kept]);
                kept += 1;
            }
            tokens.truncate(kept);
        }
        let mut kept: Vec<(usize, f64)> = tokens.into_iter().map(|token| (token, all.of(token))).collect();
        if let Some(share) = min_p {
            kept.retain(|(_, weight)| *weight >= share);
        }
        Some(kept)
    }
}

/// The `n` most likely tokens in descending order (the lowest id first among equals), and some others behind them. `max` is the greatest
/// logit, and likely tokens are first searched within a few times `scale` below it.
pub(crate) fn most_likely(logits: &[f32], max: f32, scale: f32, n: usize) -> Vec<usize> {
    let n = n.min(logits.len());
    let mut tokens = likely(logits, max, scale, |tokens| tokens.len() >= n);
    sort_first(&mut tokens, logits, 0, n);
    tokens
}

/// All tokens whose logits are at most 4, 12 or 36 times `scale` below the greatest: the smallest of these sets that is `enough`, or else
/// all tokens. Few tokens of a large vocabulary are likely, and sorting only these saves most of the time.
fn likely(logits: &[f32], max: f32, scale: f32, enough: impl Fn(&[usize]) -> bool) -> Vec<usize> {
    let bounds = [4.0, 12.0, 36.0].map(|gap| f64::from(max) - gap * f64::from(scale));
    let mut sets = bounds.into_iter().map(|bound| at_least(logits, bound));
    sets.find(|tokens| enough(tokens)).unwrap_or_else(|| (0..logits.len()).collect())
}

/// The tokens whose logits are at least `bound`.
fn at_least(logits: &[f32], bound: f64) -> Vec<usize> {
    let bound = bound as f32;
    logits.iter().enumerate().filter(|(_, logit)| **logit >= bound).map(|(token, _)| token).collect()
}

/// Brings the `n` most likely tokens to the front, in descending order (the lowest id first among equals), where the first
/// `sorted` are already; returns how many are sorted now.
fn sort_first(tokens: &mut [usize], logits: &[f32], sorted: usize, n: usize) -> usize {
    let order = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    let n = n.min(tokens.len());
    if sorted < n {
        let rest = &mut tokens[sorted..];
        if n - sorted < rest.len() {
            rest.select_nth_unstable_by(n - sorted - 1, order);
        }
        rest[..n - sorted].sort_unstable_by(order);
    }
    n.max(sorted)
}

/// The index of the greatest logit, the lowest among equals.
fn argmax(logits: &[f32]) -> Result<usize> {
    match GreatestLogit::new(logits, 0) {
        Some(greatest) => greatest.token(logits.len()),
        None => Err(Error::Logits { vocabulary: 0, problem: "the vocabulary is empty".into() }),
    }
}

#[cfg(test)]
mod test;
