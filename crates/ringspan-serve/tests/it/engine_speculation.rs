//! Tests of speculative decoding: texts equal those without it, token for token, however tokens are sampled.

use super::engine::{ask, close, greedy, most_likely, small, start};
use crate::support::*;
use ringspan_serve::engine::EngineOptions;
use ringspan_serve::engine::request::{EngineClient, Request, SamplingParams, TokenConstraint};
use std::sync::Arc;

/// Allows only tokens whose remainder by 3 goes round, and ends at a token.
#[derive(Debug)]
struct Rounds {
    next: u32,
    drawn: usize,
}

impl TokenConstraint for Rounds {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        for (token, logit) in logits.iter_mut().enumerate() {
            if token as u32 % 3 != self.next {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Result<bool, String> {
        assert_eq!(token % 3, self.next, "a token that was not allowed");
        (self.next, self.drawn) = ((self.next + 1) % 3, self.drawn + 1);
        Ok(self.drawn == 61)
    }
}

fn requests() -> Vec<Request> {
    // Repeated beginnings give drafts from the first step on; the small models soon repeat themselves anyway.
    let repeated = tokens(9, 2).repeat(4);
    let drawn = |change: fn(&mut SamplingParams)| {
        let mut sampling = SamplingParams { temperature: 0.3, seed: Some(7), ..SamplingParams::default() };
        change(&mut sampling);
        Request { sampling, ..greedy(&repeated, 80) }
    };
    let end = |request: Request| Request { stop_token_ids: vec![3, 4, 5, 6, 7, 8, 9], min_tokens: 20, ..request };
    vec![
        greedy(&repeated, 80),
        greedy(&tokens(17, 5), 90),
        end(greedy(&tokens(17, 5), 90)),
        most_likely(&repeated, 80),
        end(most_likely(&tokens(17, 5), 90)),
        drawn(|_| {}),
        end(drawn(|_| {})),
        drawn(|sampling| (sampling.top_k, sampling.top_p, sampling.min_p) = (Some(20), Some(0.9), Some(0.01))),
        drawn(|sampling| sampling.repetition_penalty = 1.05),
        drawn(|sampling| (sampling.presence_penalty, sampling.frequency_penalty) = (0.1, 0.02)),
        drawn(|sampling| sampling.logit_bias = [(5, 1.0), (9, -3.0)].into()),
        Request { constraint: Some(Box::new(Rounds { next: 0, drawn: 0 })), ..greedy(&repeated, 80) },
    ]
}

#[test]
fn texts_are_the_same_with_speculation_on_every_mesh() {
    for (name, model) in [("qwen3", qwen3()), ("gemma3", gemma3())] {
        let model = Arc::new(model);
        let plain = start(&model, 1, &small());
        let expected: Vec<_> = requests().into_iter().map(|request| ask(&plain, request)).collect();
        for (ring, num_speculative_tokens) in [(1, 3), (1, 7), (2, 5), (3, 12), (4, 2)] {
            let options = EngineOptions { num_speculative_tokens, ..small() };
            let engine = start(&model, ring, &options);
            // All at once, and then again from the prefix cache.
            for _ in 0..2 {
                let answer: Vec<_> = std::thread::scope(|scope| {
                    let ask = |request| scope.spawn(|| ask(&engine, request));
                    let asked: Vec<_> = requests().into_iter().map(ask).collect();
                    asked.into_iter().map(|answer| answer.join().expect("answer")).collect()
                });
                for (number, (answer, expected)) in answer.iter().zip(&expected).enumerate() {
                    let what = format!("{name}, {ring} ranks, {num_speculative_tokens} drafts, request {number}");
                    assert_eq!((&answer.tokens, answer.end), (&expected.tokens, expected.end), "{what}");
                    close(&answer.logprobs, &expected.logprobs);
                }
            }
            let metrics = engine.client().metrics();
            let (drafted, accepted) = (metrics.spec_decode_draft_tokens, metrics.spec_decode_accepted_tokens);
            println!("{name}, {ring} ranks: {accepted} of {drafted} drafts, {} steps", metrics.steps);
            assert!(metrics.spec_decode_drafts > 50 && accepted > 100 && accepted < drafted, "{metrics:?}");
            engine.shutdown(true).expect("ends");
        }
    }
}
