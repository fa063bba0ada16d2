//! Draws the tokens of one request from its own random stream, so that they do not depend on other requests.

use super::logprobs::Distribution;
use super::request::{Request, SamplingParams, TokenConstraint, TokenLogprobs};
use crate::sampler::Filter;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};

/// The sampler of one request.
#[derive(Debug)]
pub(super) struct TokenSampler {
    params: SamplingParams,
    random: ChaCha8Rng,
    /// Number of most likely tokens that are reported with each token.
    logprobs: Option<usize>,
    min_tokens: usize,
    stop_token_ids: Vec<u32>,
    /// Tokens of the prompt, if a penalty needs them.
    of_prompt: BTreeSet<u32>,
    /// How often each token was generated, and how many were.
    times: HashMap<u32, u32>,
    generated: usize,
    constraint: Option<Box<dyn TokenConstraint>>,
}

/// A token that was drawn.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Drawn {
    pub(super) token: u32,
    pub(super) logprobs: Option<TokenLogprobs>,
    /// Whether the grammar ends after this token.
    pub(super) ends: bool,
}

impl TokenSampler {
    /// A sampler at the start of its random stream, without a constraint.
    pub(super) fn new(request: &Request) -> Self {
        let params = request.sampling.clone();
        // Every hasher of the standard library has random keys: without a seed, so has this request.
        let seed = params.seed.unwrap_or_else(|| RandomState::new().hash_one(0u8));
        let penalizes = params.repetition_penalty != 1.0;
        Self {
            random: ChaCha8Rng::seed_from_u64(seed),
            logprobs: request.logprobs,
            min_tokens: request.min_tokens,
            stop_token_ids: request.stop_token_ids.clone(),
            of_prompt: if penalizes { request.prompt.iter().copied().collect() } else { BTreeSet::new() },
            times: HashMap::new(),
            generated: 0,
            constraint: None,
            params,
        }
    }

    /// Restricts the tokens.
    pub(super) fn with_constraint(self, constraint: Option<Box<dyn TokenConstraint>>) -> Self {
        Self { constraint, ..self }
    }

    /// Whether the next tokens are the model's most likely ones: sampling is greedy, nothing changes logits, and nobody asks for
    /// probabilities.
    pub(super) fn takes_most_likely(&self) -> bool {
        let SamplingParams { temperature, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, .. } =
            &self.params;
        let is_penalized = (*repetition_penalty, *presence_penalty, *frequency_penalty) != (1.0, 0.0, 0.0);
        let may_stop = self.generated >= self.min_tokens || self.stop_token_ids.is_empty();
        let changes_logits = is_penalized || !logit_bias.is_empty() || self.constraint.is_some() || !may_stop;
        *temperature == 0.0 && self.logprobs.is_none() && !changes_logits
    }

    /// Takes the most likely token, where [`takes_most_likely`](Self::takes_most_likely).
    pub(super) fn take(&mut self, token: u32) -> Drawn {
        self.count(token);
        Drawn { token, logprobs: None, ends: false }
    }

    fn count(&mut self, token: u32) {
        self.generated += 1;
        *self.times.entry(token).or_default() += 1;
    }

    /// Draws the next token, given its logits `[V]`, which are changed.
    pub(super) fn draw(&mut self, logits: &mut [f32]) -> Result<Drawn, String> {
        // Log-probabilities are those of the model, whatever changes the logits below.
        let raw = self.logprobs.map(|top| (logits.to_vec(), top));
        self.penalize(logits);
        for (token, bias) in &self.params.logit_bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
        if let Some(constraint) = &mut self.constraint {
            constraint.mask(logits)?;
        }
        if self.generated < self.min_tokens {
            for token in &self.stop_token_ids {
                if let Some(logit) = logits.get_mut(*token as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        let SamplingParams { temperature, top_k, top_p, min_p, .. } = self.params;
        let filter = Filter { temperature, top_k, top_p, min_p };
        let token = filter.draw(logits, &mut self.random).map_err(|error| error.to_string())?;
        let logprobs = raw.map(|(raw, top)| Distribution::new(&raw).of(token, top));
        self.count(token);
        let ends = match &mut self.constraint {
            Some(constraint) if !self.stop_token_ids.contains(&token) => constraint.advance(token)?,
            _ => false,
        };
        Ok(Drawn { token, logprobs, ends })
    }

    fn penalize(&self, logits: &mut [f32]) {
        let SamplingParams { repetition_penalty, presence_penalty, frequency_penalty, .. } = self.params;
        if repetition_penalty != 1.0 {
            let new = self.times.keys().filter(|token| !self.of_prompt.contains(token));
            for token in self.of_prompt.iter().chain(new) {
                let logit = &mut logits[*token as usize];
                *logit = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
            }
        }
        if presence_penalty != 0.0 || frequency_penalty != 0.0 {
            for (token, times) in &self.times {
                logits[*token as usize] -= presence_penalty + frequency_penalty * *times as f32;
            }
        }
    }
}
