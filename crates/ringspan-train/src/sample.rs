//! Generates a few tokens with the trained model, so that a person sees at once what it learnt.

use crate::{
    config::TrainConfig,
    error::{Result, model_error},
    hidden_states::hidden_states,
    setup::Setup,
};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use ringspan::{
    Documents, Group, Layout, LayoutKind, StrategyKind,
    comm::{
        Communicator,
        threads::{self, Options},
    },
};
use ringspan_candle::{
    RankDevice,
    context::Context,
    model::{on_device, stored},
    pool,
};
use ringspan_models::{Decoder, ModelSource};
use std::sync::Arc;

/// Number of tokens of held-out text that the sample continues.
const PROMPT_TOKENS: usize = 48;
/// Number of tokens that the model sees; without a KV cache each new token costs a forward pass over all of them.
const CONTEXT_TOKENS: usize = 256;
/// Floating-point operations that a sample may cost: seconds on one core. Larger models are sampled with `ringspan generate`.
const MAX_OPERATIONS: u64 = 1_000_000_000_000;
const TEMPERATURE: f64 = 0.7;

/// A part of the held-out text and the model's continuation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Held-out text that the model was given.
    pub prompt: String,
    /// The tokens that the model generated, as text.
    pub continuation: String,
}

/// Samples the model in the run's folder at a fixed temperature; none where there is no text, or the model is too large to do so
/// in seconds.
pub(crate) fn sample(config: &TrainConfig, setup: &Setup, device: &RankDevice) -> Result<Option<Sample>> {
    let parameters: u64 = setup.spec.shapes.values().map(|s| s.iter().product::<usize>() as u64).sum();
    let affordable = (MAX_OPERATIONS / (2 * parameters.max(1) * CONTEXT_TOKENS as u64)) as usize;
    let (Some(tokenizer), Some(sequence)) = (&setup.tokenizer, setup.held_out.first()) else { return Ok(None) };
    let segment = sequence.segment_lengths.first().copied().unwrap_or(0);
    let mut tokens = sequence.tokens[..segment.min(PROMPT_TOKENS)].to_vec();
    let prompt = tokens.len();
    let count = affordable.min(config.sample_tokens);
    // A few words of a large model would tell nothing.
    if count == 0 || affordable < 20 || prompt == 0 {
        return Ok(None);
    }
    let (model, weights) = ModelSource::at(&config.out).and_then(ModelSource::load).map_err(model_error)?;
    let decoder = Decoder::new(model).map_err(model_error)?;
    let weights = on_device(&stored(weights), device).map_err(model_error)?;
    let options = Options { deadline: config.deadline, ..Options::default() };
    let generate = |world: Arc<dyn Communicator>| {
        let group = Arc::new(Group::new(world, (1, 1), device.kernel(config.threads)?)?);
        let mut random = ChaCha8Rng::seed_from_u64(config.seed);
        let mut tokens = tokens.clone();
        for _ in 0..count {
            let window = &tokens[tokens.len().saturating_sub(CONTEXT_TOKENS)..];
            let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(1, window.len()), 1)?;
            let context = Context::new(group.clone(), Arc::new(layout), StrategyKind::Ring)?;
            let hidden = hidden_states(&decoder, &weights, window, &context).map_err(model_error)?;
            let last = hidden.narrow(0, window.len() - 1, 1)?;
            let last = decoder.norm(&weights, &last).map_err(model_error)?;
            let logits: Vec<f32> = decoder.model().head().logits(&last, &weights)?.flatten_all()?.to_vec1()?;
            let next = draw_token(&logits, &mut random);
            if Some(next) == tokenizer.end_of_text() {
                break;
            }
            tokens.push(next);
        }
        Result::Ok(tokens)
    };
    let generated = threads::run(1, options, |world| pool::run(config.threads, || generate(world))?)?;
    tokens = generated.into_iter().next().unwrap_or(tokens);
    Ok(Some(Sample {
        prompt: tokenizer.decode(&tokens[..prompt])?,
        continuation: tokenizer.decode(&tokens[prompt..])?,
    }))
}

/// Draws one token from the softmax of the logits at the fixed temperature.
fn draw_token(logits: &[f32], random: &mut ChaCha8Rng) -> u32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |&l: &f32| (f64::from(l - max) / TEMPERATURE).exp();
    let total: f64 = logits.iter().map(weight).sum();
    let mut left = (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * total;
    for (token, logit) in logits.iter().enumerate() {
        left -= weight(logit);
        if left < 0.0 {
            return token as u32;
        }
    }
    logits.len().saturating_sub(1) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_drawn_as_often_as_the_temperature_says() {
        let logits = [0.0f32, 0.7, f32::NEG_INFINITY, -0.7];
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let mut counts = [0.0; 4];
        for _ in 0..20_000 {
            counts[draw_token(&logits, &mut random) as usize] += 1.0 / 20_000.0;
        }
        let total = 1.0 + 1f64.exp() + (-1f64).exp();
        for (count, expected) in counts.iter().zip([1.0 / total, 1f64.exp() / total, 0.0, (-1f64).exp() / total]) {
            assert!((count - expected).abs() < 0.02, "{counts:?}");
        }
    }
}
