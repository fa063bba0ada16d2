//! Tests of the sampler against plain computations.

use super::super::logprobs::Distribution;
use super::super::request::{Request, SamplingParams, TokenConstraint};
use super::super::token_sampler::TokenSampler;
use super::request;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn sampler(params: SamplingParams, prompt: &[u32]) -> TokenSampler {
    TokenSampler::new(&Request { sampling: params, ..request(prompt, 100) })
}

/// The tokens that can be drawn, by drawing often.
fn support(params: &SamplingParams, logits: &[f32]) -> BTreeSet<u32> {
    let seeds = 0..600;
    let draw = |seed| {
        let params = SamplingParams { seed: Some(seed), ..params.clone() };
        sampler(params, &[0]).draw(&mut logits.to_vec()).expect("a token").token
    };
    seeds.map(draw).collect()
}

/// The tokens that Hugging Face's warpers keep, in their order: temperature, top-k, top-p, min-p.
fn kept(params: &SamplingParams, logits: &[f32]) -> BTreeSet<u32> {
    let mut rows: Vec<(usize, f64)> =
        logits.iter().map(|logit| f64::from(*logit) / f64::from(params.temperature)).enumerate().collect();
    rows.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    rows.truncate(params.top_k.unwrap_or(usize::MAX));
    let softmax = |rows: &[(usize, f64)]| {
        let total: f64 = rows.iter().map(|row| (row.1 - rows[0].1).exp()).sum();
        rows.iter().map(|row| (row.1 - rows[0].1).exp() / total).collect::<Vec<f64>>()
    };
    if let Some(p) = params.top_p {
        let mut before = 0.0;
        let mut is_needed = |q: f64| {
            let needed = before < f64::from(p);
            before += q;
            needed
        };
        let count = softmax(&rows).into_iter().take_while(|q| is_needed(*q)).count().max(1);
        rows.truncate(count);
    }
    if let Some(share) = params.min_p {
        let probabilities = softmax(&rows);
        let most = probabilities[0];
        let enough = probabilities.iter().filter(|q| **q >= f64::from(share) * most).count();
        rows.truncate(enough);
    }
    rows.into_iter().map(|row| row.0 as u32).collect()
}

#[test]
fn filters_keep_what_hugging_face_keeps() {
    // No sum of these probabilities is near one of the limits, and the rarest kept token has one percent.
    let logits: Vec<f32> = [0.3f32, 0.25, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02].map(f32::ln).to_vec();
    for temperature in [0.7, 1.0, 1.4] {
        for top_k in [None, Some(1), Some(3), Some(6)] {
            for top_p in [None, Some(0.0), Some(0.52), Some(0.83)] {
                for min_p in [None, Some(0.15), Some(0.5)] {
                    let params = SamplingParams { temperature, top_k, top_p, min_p, ..SamplingParams::default() };
                    assert_eq!(support(&params, &logits), kept(&params, &logits), "{params:?}");
                }
            }
        }
    }
}

/// Sorting a part of a large vocabulary finds the same nucleus as sorting all of it.
#[test]
fn a_nucleus_of_a_large_vocabulary_is_that_of_the_whole_order() {
    let logits: Vec<f32> = (0..5000).map(|i| ((i * 7919) % 5000) as f32 / 700.0).collect();
    for top_p in [0.1, 0.5, 0.9, 0.999] {
        let params = SamplingParams { top_p: Some(top_p), ..SamplingParams::default() };
        let kept = kept(&params, &logits);
        assert!(support(&params, &logits).is_subset(&kept), "{top_p}");
    }
}

proptest! {
    /// Penalties and bias change logits by their formulas; greedy drawing shows the greatest of the result.
    #[test]
    fn penalties_follow_their_formulas(
        logits in proptest::collection::vec(-4.0f32..4.0, 6..12),
        prompt in proptest::collection::vec(0u32..6, 1..5),
        repetition in prop_oneof![Just(1.0f32), 0.5f32..3.0],
        presence in -2.0f32..2.0,
        frequency in -2.0f32..2.0,
        bias in proptest::collection::btree_map(0u32..6, -5.0f32..5.0, 0..4),
    ) {
        let params = SamplingParams {
            temperature: 0.0,
            repetition_penalty: repetition,
            presence_penalty: presence,
            frequency_penalty: frequency,
            logit_bias: bias.clone(),
            ..SamplingParams::default()
        };
        let mut sampler = sampler(params, &prompt);
        let mut times: BTreeMap<u32, u32> = BTreeMap::new();
        for _ in 0..8 {
            let token = sampler.draw(&mut logits.clone()).expect("a token").token;
            let expected = (0..logits.len() as u32).map(|token| {
                let mut logit = logits[token as usize];
                if repetition != 1.0 && (prompt.contains(&token) || times.contains_key(&token)) {
                    logit = if logit < 0.0 { logit * repetition } else { logit / repetition };
                }
                if let Some(times) = times.get(&token) {
                    logit -= presence + frequency * *times as f32;
                }
                logit + bias.get(&token).copied().unwrap_or(0.0)
            });
            let expected: Vec<f32> = expected.collect();
            let best = expected.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            prop_assert!(best - expected[token as usize] < 1e-5, "{token} of {expected:?}");
            *times.entry(token).or_default() += 1;
        }
    }

    #[test]
    fn log_probabilities_are_those_of_the_softmax(
        logits in proptest::collection::vec(-30.0f32..30.0, 1..40), n in 0usize..45,
    ) {
        let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        let exact: Vec<f64> = logits.iter().map(|logit| (f64::from(*logit).exp() / total).ln()).collect();
        let distribution = Distribution::new(&logits);
        for token in 0..logits.len() {
            let reported = distribution.of(token as u32, n);
            prop_assert!((f64::from(reported.logprob) - exact[token]).abs() < 1e-4);
            prop_assert_eq!(reported.top.len(), n.min(logits.len()));
            prop_assert!(reported.top.is_sorted_by(|a, b| a.1 >= b.1));
            for (token, logprob) in &reported.top {
                prop_assert!((f64::from(*logprob) - exact[*token as usize]).abs() < 1e-4);
            }
        }
    }
}

#[test]
fn stop_tokens_cannot_be_drawn_too_early() {
    let request = Request { min_tokens: 2, stop_token_ids: vec![1], ..request(&[0], 5) };
    let mut sampler = TokenSampler::new(&request);
    let tokens: Vec<u32> = (0..4).map(|_| sampler.draw(&mut [0.0, 9.0, 1.0]).expect("a token").token).collect();
    assert_eq!(tokens, [2, 2, 1, 1]);
}

#[test]
fn log_probabilities_do_not_show_what_changes_the_draw() {
    let params = SamplingParams { logit_bias: [(2, 100.0)].into(), temperature: 0.3, ..SamplingParams::default() };
    let request = Request { sampling: params, logprobs: Some(1), ..request(&[0], 5) };
    let drawn = TokenSampler::new(&request).draw(&mut [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()]).expect("a token");
    let logprobs = drawn.logprobs.expect("asked for");
    assert_eq!((drawn.token, logprobs.token), (2, 2));
    assert!((logprobs.logprob - 0.2f32.ln()).abs() < 1e-6);
    assert!(logprobs.top[0].0 == 0 && (logprobs.top[0].1 - 0.5f32.ln()).abs() < 1e-6);
}

/// Two tokens, and then the text must end.
#[derive(Debug)]
struct Alternating(u32);

impl TokenConstraint for Alternating {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        for (token, logit) in logits.iter_mut().enumerate() {
            if token as u32 % 2 != self.0 % 2 {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn advance(&mut self, _: u32) -> Result<bool, String> {
        self.0 += 1;
        if self.0 > 3 { Err("the text has ended".to_owned()) } else { Ok(self.0 == 2) }
    }
}

#[test]
fn a_constraint_restricts_the_tokens_and_ends_the_text() {
    let mut sampler = sampler(SamplingParams { temperature: 0.0, ..SamplingParams::default() }, &[0])
        .with_constraint(Some(Box::new(Alternating(0))));
    let mut draw = || sampler.draw(&mut [1.0, 5.0, 2.0, 4.0]);
    let first = draw().expect("a token");
    assert_eq!((first.token, first.ends), (2, false));
    let second = draw().expect("a token");
    assert_eq!((second.token, second.ends), (1, true));
    draw().expect("a token");
    assert!(draw().expect_err("the constraint's").contains("has ended"));
    let mut all = vec![f32::NEG_INFINITY; 2];
    assert!(TokenSampler::new(&request(&[0], 1)).draw(&mut all).expect_err("no token is left").contains("-inf"));
}

#[test]
fn requests_without_a_seed_differ_and_those_with_one_do_not() {
    let draw = |seed: Option<u64>| {
        let mut sampler = sampler(SamplingParams { seed, ..SamplingParams::default() }, &[0]);
        (0..32).map(|_| sampler.draw(&mut [0.0; 64]).expect("a token").token).collect::<Vec<u32>>()
    };
    assert_eq!(draw(Some(3)), draw(Some(3)));
    assert_ne!(draw(Some(3)), draw(Some(4)));
    assert_ne!(draw(None), draw(None));
}
