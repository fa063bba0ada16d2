use super::*;
use proptest::prelude::*;
use rand_chacha::rand_core::RngCore;

fn sampling(temperature: f32, top_k: Option<usize>, top_p: Option<f32>) -> Sampling {
    Sampling { temperature, top_k, top_p, seed: 7 }
}

fn draws(sampling: Sampling, logits: &[f32], n: usize) -> Vec<u32> {
    let mut sampler = Sampler::new(sampling).expect("options");
    (0..n).map(|_| sampler.sample(logits).expect("logits")).collect()
}

fn support(sampling: Sampling, logits: &[f32], n: usize) -> Vec<u32> {
    let mut seen = draws(sampling, logits, n);
    seen.sort_unstable();
    seen.dedup();
    seen
}

proptest! {
    #[test]
    fn temperature_zero_takes_the_greatest_and_the_lowest_id_among_equals(
        logits in proptest::collection::vec(-3i8..3, 1..40),
    ) {
        let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let first = logits.iter().position(|l| *l == max).expect("not empty");
        prop_assert_eq!(draws(sampling(0.0, None, None), &logits, 1), vec![first as u32]);
    }

    #[test]
    fn top_k_draws_only_from_the_k_best(
        logits in proptest::collection::vec(-50i8..50, 1..30), k in 1usize..32,
    ) {
        let logits: Vec<f32> = logits.into_iter().map(|l| f32::from(l) / 20.0).collect();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        let allowed = &order[..k.min(order.len())];
        for token in draws(sampling(1.5, Some(k), None), &logits, 60) {
            prop_assert!(allowed.contains(&(token as usize)));
        }
    }

    #[test]
    fn a_full_nucleus_and_a_full_k_change_nothing(
        logits in proptest::collection::vec(-50i8..50, 1..30), seed in any::<u64>(),
    ) {
        let logits: Vec<f32> = logits.into_iter().map(|l| f32::from(l) / 20.0).collect();
        let plain = Sampling { seed, ..sampling(0.7, None, None) };
        let full = Sampling { top_p: Some(1.0), ..plain };
        prop_assert_eq!(draws(plain, &logits, 20), draws(full, &logits, 20));
        let sorted = Sampling { top_k: Some(logits.len()), ..plain };
        let all = Sampling { top_k: Some(logits.len() + 5), ..plain };
        prop_assert_eq!(draws(sorted, &logits, 20), draws(all, &logits, 20));
    }
}

proptest! {
    /// Vocabularies of which a few tokens are likely, and such of which many are, against sorting all of them.
    #[test]
    fn what_may_be_drawn_of_a_large_vocabulary_are_its_most_likely_tokens(
        seed in any::<u64>(), spread in prop_oneof![Just(0.5f32), Just(8.0), Just(60.0)], temperature in 0.2f32..5.0,
        top_k in proptest::option::of(1usize..4000), top_p in proptest::option::of(0.0f32..1.0),
        min_p in proptest::option::of(1e-6f32..1.0),
    ) {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        // Steps, so that there are equals.
        let logits: Vec<f32> = (0..3000).map(|_| (random.next_u32() % 1000) as f32 / 1000.0 * spread).collect();
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |token: usize| ((f64::from(logits[token]) - f64::from(max)) / f64::from(temperature)).exp();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        order.truncate(top_k.unwrap_or(usize::MAX));
        let filter = Filter { temperature, top_k, top_p, min_p };
        let Some(candidates) = filter.candidates(&logits, max, &TokenWeights::new(&logits, max, temperature)) else {
            prop_assert_eq!((top_k, top_p, min_p), (None, None, None));
            return Ok(());
        };
        let mut tokens: Vec<usize> = candidates.iter().map(|(token, _)| *token).collect();
        // Without others, tokens of at least some probability are in the order of the vocabulary.
        if top_k.is_none() && top_p.is_none() {
            tokens.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        }
        prop_assert_eq!(&tokens[..], &order[..tokens.len()]);
        prop_assert!(!tokens.is_empty());
        let (mut shares, last) = (vec![], tokens[tokens.len() - 1]);
        if let Some(p) = top_p {
            let total: f64 = order.iter().map(|token| weight(*token)).sum();
            let sum: f64 = tokens.iter().map(|token| weight(*token)).sum();
            prop_assert!(tokens.len() == 1 || sum - weight(last) < f64::from(p) * total * (1.0 + 1e-5));
            shares.push(sum >= f64::from(p) * total * (1.0 - 1e-5));
        }
        if let Some(share) = min_p {
            prop_assert!(weight(last) >= f64::from(share) * (1.0 - 1e-5));
            let next = order.get(tokens.len());
            shares.push(next.is_none_or(|next| weight(*next) < f64::from(share) * (1.0 + 1e-5)));
        }
        // One of the limits is why there are no more tokens.
        prop_assert!(tokens.len() == order.len() || shares.contains(&true), "{} of {}", tokens.len(), order.len());
    }

    #[test]
    fn the_most_likely_tokens_come_first(
        logits in proptest::collection::vec(prop_oneof![-100.0f32..100.0, Just(f32::NEG_INFINITY), Just(50.0)], 1..300), n in 0usize..400,
    ) {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        let n = n.min(logits.len());
        prop_assert_eq!(&most_likely(&logits, max, 1.0, n)[..n], &order[..n]);
    }
}

#[test]
fn top_k_keeps_exactly_k_among_equals() {
    assert_eq!(support(sampling(1.0, Some(3), None), &[0.5; 8], 400), [0, 1, 2]);
    assert_eq!(support(sampling(1.0, Some(2), None), &[0.0, 2.0, 1.0, 1.0, 1.0], 400), [1, 2]);
}

#[test]
fn top_p_keeps_the_smallest_set_that_reaches_p() {
    // Probabilities 0.5, 0.3, 0.2.
    let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
    assert_eq!(support(sampling(1.0, None, Some(0.0)), &logits, 300), [0]);
    assert_eq!(support(sampling(1.0, None, Some(0.49)), &logits, 300), [0]);
    assert_eq!(support(sampling(1.0, None, Some(0.51)), &logits, 300), [0, 1]);
    assert_eq!(support(sampling(1.0, None, Some(0.81)), &logits, 300), [0, 1, 2]);
}

#[test]
fn top_p_counts_what_top_k_left_at_the_asked_temperature() {
    let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
    // After top-k 2 the probabilities are 0.625 and 0.375: 0.6 is reached by the first alone.
    assert_eq!(support(sampling(1.0, Some(2), Some(0.6)), &logits, 300), [0]);
    assert_eq!(support(sampling(1.0, None, Some(0.6)), &logits, 300), [0, 1]);
    // A high temperature flattens them, a low one sharpens them.
    assert_eq!(support(sampling(100.0, None, Some(0.6)), &logits, 300), [0, 1]);
    assert_eq!(support(sampling(0.1, None, Some(0.9)), &logits, 300), [0]);
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln(), f32::NEG_INFINITY];
    let n = 20_000;
    let mut counts = [0usize; 4];
    for token in draws(sampling(1.0, None, None), &logits, n) {
        counts[token as usize] += 1;
    }
    for (count, p) in counts.iter().zip([0.5, 0.3, 0.2, 0.0]) {
        // Four standard deviations.
        let slack = 4.0 * (n as f64 * p * (1.0 - p)).sqrt();
        assert!((*count as f64 - n as f64 * p).abs() <= slack, "{counts:?}");
    }
}

#[test]
fn the_seed_fixes_the_stream_and_another_seed_changes_it() {
    let logits = [0.0f32; 64];
    let a = sampling(1.0, None, None);
    assert_eq!(draws(a, &logits, 32), draws(a, &logits, 32));
    assert_ne!(draws(a, &logits, 32), draws(Sampling { seed: 8, ..a }, &logits, 32));
}

#[test]
fn extreme_temperatures_stay_finite() {
    assert_eq!(draws(sampling(f32::MIN_POSITIVE, None, None), &[1.0, 1e30, -1e30], 5), [1; 5]);
    assert_eq!(support(sampling(f32::MAX, None, None), &[1.0, -1.0], 200), [0, 1]);
}

#[test]
fn options_out_of_range_or_without_effect_are_refused() {
    let refused = |s: Sampling| s.check().map_err(|e| e.to_string()).expect_err("must be refused");
    assert!(refused(sampling(-1.0, None, None)).contains("-1"));
    assert!(refused(sampling(f32::NAN, None, None)).contains("NaN"));
    assert!(refused(sampling(1.0, Some(0), None)).contains("top-k 0"));
    assert!(refused(sampling(1.0, None, Some(1.5))).contains("1.5"));
    assert!(refused(sampling(0.0, Some(4), None)).contains("no effect"));
    assert!(refused(sampling(0.0, None, Some(0.4))).contains("no effect"));
}

#[test]
fn logits_that_are_no_distribution_are_refused() {
    let mut sampler = Sampler::new(Sampling::greedy()).expect("options");
    for (logits, word) in [
        (vec![0.0, f32::NAN], "token 1"),
        (vec![f32::INFINITY], "token 0"),
        (vec![f32::NEG_INFINITY; 3], "-inf"),
        (vec![], "empty"),
    ] {
        let message = sampler.sample(&logits).expect_err("must be refused").to_string();
        assert!(message.contains(word), "{message}");
    }
}
