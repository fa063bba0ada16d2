//! Chooses how many prompt tokens a step prefills while other requests decode, from the measured times of earlier steps.
//!
//! The time of a step is the time between two tokens of every decoding request. A *mixed* step, which prefills prompt tokens while other
//! requests decode, may take [`MAX_SLOWDOWN`] times what a *decode-only* step takes, and a share of [`TARGET_EXCEEDANCE`] of the mixed
//! steps may take longer. So while prompts wait, they have up to nearly two thirds of the time, less where times vary, however fast the
//! machine, the model and the mesh are, and however long the texts. Mixed steps take longer where this would be fewer than
//! [`MIN_PREFILL_TOKENS`] tokens.

use std::collections::VecDeque;
use std::time::Duration;

/// How many times as long as a decode-only step a mixed step may take. Clients should see three times the time that they see without
/// prompts; less is allowed here, because decode-only steps are measured between mixed steps, where they take longer: mixed steps leave
/// other data in the processor's caches.
const MAX_SLOWDOWN: f64 = 2.8;

/// Fewest prompt tokens of a mixed step, and their number as long as no prompt has been measured. This bounds how long a prompt takes
/// where one token takes longer than a decode-only step. They are few, so that [`MAX_SLOWDOWN`] holds even where one request decodes with
/// quantized weights: its steps are as fast as weights are read, and each prompt token adds arithmetic that does not get faster with
/// more tokens.
const MIN_PREFILL_TOKENS: usize = 4;

/// Number of measurements of the time of a prompt's token, whose median counts: one slow step changes nothing.
const TOKEN_MEASUREMENTS: usize = 5;

/// Number of measurements of decode-only steps that count. Machines may be slow for several steps in a row; if these were all that is
/// known, mixed steps would take too long until the next measurement.
const DECODE_MEASUREMENTS: usize = 16;

/// The share of mixed steps that may take longer than [`MAX_SLOWDOWN`] allows. Times vary, since other programs run and caches are shared,
/// and a budget that follows from medians alone would be exceeded in every other step.
const TARGET_EXCEEDANCE: f64 = 0.01;

/// By how much the logarithm of the margin grows with a step that exceeds [`MAX_SLOWDOWN`]. A quantile of the last times, in place of this
/// feedback, was exceeded twice as often as wanted, since times vary more from minute to minute than within few steps.
const MARGIN_RATE: f64 = 0.1;

/// Upper limit of the margin: a step that exceeds even this is slow for other reasons than its number of prompt tokens.
const LARGEST_MARGIN: f64 = 4.0;

/// Steps whose time is not that of a decode-only step, after which one is measured again, since its time grows with the texts.
const REMEASURE_AFTER: usize = 32;

/// Mixed steps that a batch class without measurements may run before a decode-only step is scheduled to measure it. When several
/// prompts arrive together, each step has more sequences than the one before, and the classes on the way need no measurement.
const JOIN_GRACE_STEPS: usize = 4;

/// Measured times of steps, and the number of prompt tokens that follows from them.
#[derive(Debug)]
pub(super) struct PrefillBudget {
    /// Largest number of prompt tokens in a step.
    most: usize,
    /// The number of prompt tokens in a mixed step, if it does not follow from measured times.
    fixed: Option<usize>,
    /// Times of decode-only steps by the number of their sequences: batch class i has 2^(i-1) + 1 to 2^i of them.
    decodes: Vec<DecodeTimes>,
    /// Seconds that a step takes longer for each token of a prompt.
    per_token: Recent<TOKEN_MEASUREMENTS>,
    /// How many times longer than `per_token` says the tokens of a prompt are expected to take. It grows with each step that exceeds
    /// [`MAX_SLOWDOWN`] and shrinks a little with each that does not, such that [`TARGET_EXCEEDANCE`] of them do (stochastic approximation
    /// of a quantile; Robbins and Monro, 1951).
    margin: f64,
}

#[derive(Debug, Default)]
struct DecodeTimes {
    seconds: Recent<DECODE_MEASUREMENTS>,
    /// Steps of this batch class since the last decode-only step that was timed: mixed ones, and those whose time does not count.
    since: usize,
}

impl DecodeTimes {
    /// The time of a decode-only step: the lower quartile of those measured, because a decode-only step between two mixed ones finds
    /// their data in the processor's caches, and takes longer than one among others of its kind.
    fn usual(&self) -> Option<f64> {
        self.seconds.quantile(0.25)
    }
}

/// The last `MOST` measurements of a time.
#[derive(Debug, Default)]
struct Recent<const MOST: usize>(VecDeque<f64>);

impl<const MOST: usize> Recent<MOST> {
    fn add(&mut self, value: f64) {
        if self.0.len() == MOST {
            self.0.pop_front();
        }
        self.0.push_back(value);
    }

    fn median(&self) -> Option<f64> {
        self.quantile(0.5)
    }

    /// The quantile of a share from 0 to 1, its index rounded down.
    fn quantile(&self, share: f64) -> Option<f64> {
        let mut sorted: Vec<f64> = self.0.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        sorted.get((share * sorted.len().saturating_sub(1) as f64) as usize).copied()
    }
}

impl PrefillBudget {
    /// A step prefills up to `most` prompt tokens; `fixed` tokens, if given, while others decode.
    pub(super) fn new(most: usize, fixed: Option<usize>) -> Self {
        let fixed = fixed.map(|fixed| fixed.min(most));
        Self { most, fixed, decodes: Vec::new(), per_token: Recent::default(), margin: 1.0 }
    }

    /// How many prompt tokens the next step prefills if `generating` sequences decode in it.
    ///
    /// Returns 0 if the next step must be decode-only, so that its time is measured; this happens only if `generating` is above 0.
    pub(super) fn tokens(&self, generating: usize) -> usize {
        if generating == 0 {
            return self.most;
        }
        if let Some(fixed) = self.fixed {
            return fixed;
        }
        let Some(decode) = self.decode_seconds(batch_class(generating)) else { return 0 };
        let Some(per_token) = self.per_token.median() else { return MIN_PREFILL_TOKENS.min(self.most) };
        let tokens = (MAX_SLOWDOWN - 1.0) * decode / (per_token * self.margin).max(f64::MIN_POSITIVE);
        // Casting saturates.
        (tokens as usize).max(MIN_PREFILL_TOKENS).min(self.most)
    }

    /// Expected seconds of a decode-only step; `None` if one must be measured first. A batch class without measurements has the time of
    /// the nearest smaller class that was measured for its first [`JOIN_GRACE_STEPS`] mixed steps, since sequences may still be joining.
    fn decode_seconds(&self, class: usize) -> Option<f64> {
        let since = self.decodes.get(class).map_or(0, |times| times.since);
        match self.decodes.get(class).and_then(|times| times.usual()) {
            Some(seconds) => (since < REMEASURE_AFTER).then_some(seconds),
            None if since < JOIN_GRACE_STEPS => self.decodes.iter().take(class).rev().find_map(|times| times.usual()),
            None => None,
        }
    }

    /// Counts a step with `generating` decoding sequences whose time is not recorded. After [`REMEASURE_AFTER`] of them the known times are
    /// dropped, since they are those of other texts.
    pub(super) fn record_untimed_step(&mut self, generating: usize) {
        if generating == 0 {
            return;
        }
        let Some(times) = self.decodes.get_mut(batch_class(generating)) else { return };
        times.since += 1;
        if times.since >= REMEASURE_AFTER {
            *times = DecodeTimes::default();
        }
    }

    /// Records that a step took `time` in which `generating` sequences decoded and `tokens` prompt tokens were prefilled.
    pub(super) fn record_step(&mut self, generating: usize, tokens: usize, time: Duration) {
        let seconds = time.as_secs_f64();
        if generating == 0 {
            if tokens > 0 {
                self.per_token.add(seconds / tokens as f64);
            }
            return;
        }
        let allowed = self.tokens(generating);
        let class = batch_class(generating);
        if self.decodes.len() <= class {
            self.decodes.resize_with(class + 1, DecodeTimes::default);
        }
        let times = &mut self.decodes[class];
        if tokens == 0 {
            times.seconds.add(seconds);
            times.since = 0;
            return;
        }
        times.since += 1;
        // The last tokens of a prompt say little, since few share the time that any step takes longer with a prompt.
        let Some(decode) = times.usual().filter(|_| 2 * tokens >= allowed) else { return };
        // Fewer tokens would not be read, whatever the margin is.
        if tokens > MIN_PREFILL_TOKENS {
            let exceeds = f64::from(seconds > MAX_SLOWDOWN * decode);
            let margin = self.margin * (MARGIN_RATE * (exceeds - TARGET_EXCEEDANCE)).exp();
            self.margin = margin.clamp(1.0, LARGEST_MARGIN);
        }
        // A step may be faster than the median of others.
        self.per_token.add((seconds - decode).max(0.0) / tokens as f64);
    }
}

fn batch_class(generating: usize) -> usize {
    generating.next_power_of_two().trailing_zeros() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seconds of a step on a machine: for itself, for each sequence that generates, and for each token of a prompt after
    /// `depth` others.
    struct Machine {
        step: f64,
        sequence: f64,
        token: f64,
        per_depth: f64,
    }

    impl Machine {
        fn takes(&self, generating: usize, tokens: usize, depth: usize) -> f64 {
            let token = self.token + self.per_depth * depth as f64;
            self.step + self.sequence * generating as f64 + token * tokens as f64
        }

        /// Reads a prompt while `generating` sequences generate; the tokens and the seconds of each step.
        fn read(&self, budget: &mut PrefillBudget, generating: usize, prompt: usize) -> Vec<(usize, f64)> {
            let (mut read, mut steps) = (0, Vec::new());
            while read < prompt {
                let tokens = budget.tokens(generating).min(prompt - read);
                let seconds = self.takes(generating, tokens, read);
                budget.record_step(generating, tokens, Duration::from_secs_f64(seconds));
                steps.push((tokens, seconds));
                read += tokens;
                assert!(steps.len() <= prompt, "the prompt is not read");
            }
            steps
        }
    }

    /// Machines of very different speeds, one of them a hundred times slower with many sequences than with one.
    const MACHINES: [Machine; 4] = [
        Machine { step: 0.010, sequence: 0.0010, token: 0.0007, per_depth: 0.0 },
        Machine { step: 0.010, sequence: 0.0065, token: 0.0007, per_depth: 2e-8 },
        Machine { step: 0.0002, sequence: 0.0001, token: 1e-5, per_depth: 3e-10 },
        Machine { step: 1.5, sequence: 0.01, token: 0.02, per_depth: 2e-6 },
    ];

    #[test]
    fn a_step_with_a_prompt_takes_three_times_as_long_as_one_without() {
        for machine in MACHINES {
            for generating in [1, 5, 16, 60] {
                let mut budget = PrefillBudget::new(100_000, None);
                let first = machine.read(&mut budget, 0, 2000);
                assert_eq!(first.len(), 1, "alone, a prompt is read in the largest chunks");
                let alone = machine.takes(generating, 0, 0);
                let steps = machine.read(&mut budget, generating, 32_000);
                let longest = steps.iter().map(|(_, seconds)| *seconds).fold(0.0, f64::max);
                let allowed = (3.4 * alone).max(1.001 * machine.takes(generating, MIN_PREFILL_TOKENS, 32_000));
                assert!(longest < allowed, "{longest} s, {alone} s alone, {generating} generate");
                let (tokens, seconds) =
                    steps.iter().fold((0, 0.0), |(tokens, all), step| (tokens + step.0, all + step.1));
                assert_eq!(tokens, 32_000);
                let decodes = steps.len() as f64 * alone;
                let share = 1.0 - decodes / seconds;
                assert!(share > 0.6, "prompts get {share} of the time, {generating} generate");
                let measuring = steps.iter().filter(|(tokens, _)| *tokens == 0).count();
                assert!(measuring <= 1 + steps.len() / REMEASURE_AFTER, "{measuring} of {} steps", steps.len());
            }
        }
    }

    #[test]
    fn more_sequences_that_generate_leave_more_time_for_prompts() {
        let machine = &MACHINES[1];
        let mut budget = PrefillBudget::new(480, None);
        machine.read(&mut budget, 0, 480);
        let chunk = |budget: &mut PrefillBudget, generating| {
            let steps = machine.read(budget, generating, 4000);
            steps[steps.len() / 2..].iter().map(|(tokens, _)| *tokens).max()
        };
        let chunks: Vec<_> = [1, 2, 4, 8, 16, 32].map(|generating| chunk(&mut budget, generating)).to_vec();
        assert!(chunks.is_sorted(), "{chunks:?}");
        // 1.8 times 16.5 ms of 0.70 to 0.78 ms a token, and the largest chunk.
        assert!((38..=42).contains(&chunks[0].unwrap_or(0)) && chunks[5] == Some(480), "{chunks:?}");
        assert!(chunks[4] > Some(200), "{chunks:?}");
    }

    #[test]
    fn one_slow_step_changes_nothing_and_slow_prompts_get_their_fewest_tokens() {
        let machine = &MACHINES[0];
        let mut budget = PrefillBudget::new(512, None);
        machine.read(&mut budget, 0, 512);
        machine.read(&mut budget, 60, 1000);
        let usual = budget.tokens(60);
        assert!(usual > MIN_PREFILL_TOKENS);
        budget.record_step(60, usual, Duration::from_secs(9));
        assert!(budget.tokens(60).abs_diff(usual) <= usual / 8, "{} and {usual}", budget.tokens(60));
        let slow = Machine { token: 1.0, ..MACHINES[0] };
        let steps = slow.read(&mut budget, 60, 4000);
        assert!(steps[20..].iter().all(|(tokens, _)| *tokens <= MIN_PREFILL_TOKENS), "{steps:?}");
    }

    #[test]
    fn where_times_vary_98_of_100_steps_stay_within_three_times() {
        let machine = &MACHINES[0];
        for slowest in [1.1, 1.5, 2.0] {
            let mut budget = PrefillBudget::new(100_000, None);
            budget.record_step(4, 0, Duration::from_secs_f64(machine.takes(4, 0, 0)));
            let mut seconds = Vec::new();
            for step in 0..1000 {
                let tokens = budget.tokens(4);
                // Tokens take 1 to `slowest` times the shortest time, in a mixed order that repeats after 101 steps.
                let noise = 1.0 + (slowest - 1.0) * f64::from(step * step % 101) / 100.0;
                let time = machine.takes(4, 0, 0) + machine.token * tokens as f64 * noise;
                budget.record_step(4, tokens, Duration::from_secs_f64(time));
                seconds.push(time / machine.takes(4, 0, 0));
            }
            seconds.drain(..100);
            seconds.sort_by(f64::total_cmp);
            let percentile = |percent: usize| seconds[seconds.len() * percent / 100];
            assert!(percentile(98) <= MAX_SLOWDOWN, "noise of {slowest}: {}", percentile(98));
            assert!(percentile(50) > 2.0, "noise of {slowest}: {}", percentile(50));
        }
    }

    #[test]
    fn short_prompts_and_the_ends_of_prompts_do_not_make_budgets_small() {
        // 20 ms a step, 5 ms more with a prompt, 0.1 ms a token: 350 tokens would take 40 ms more.
        let takes =
            |tokens: usize| Duration::from_secs_f64(0.02 + if tokens > 0 { 0.005 } else { 0.0 } + 1e-4 * tokens as f64);
        for prompt in [20_000, 300, 1_003] {
            let mut budget = PrefillBudget::new(512, None);
            for _ in 0..3 {
                budget.record_step(0, 3, takes(3));
            }
            let mut budgets = Vec::new();
            for _ in 0..40 {
                let mut left = prompt;
                while left > 0 {
                    let allowed = budget.tokens(1);
                    let tokens = allowed.min(left);
                    budget.record_step(1, tokens, takes(tokens));
                    left -= tokens;
                    budgets.push(allowed);
                }
            }
            budgets.retain(|allowed| *allowed > 0);
            let settled = &budgets[10.min(budgets.len() - 1)..];
            assert!(settled.iter().all(|allowed| *allowed > 250), "prompts of {prompt}: {settled:?}");
        }
    }

    #[test]
    fn a_number_that_was_asked_for_does_not_depend_on_times() {
        let mut budget = PrefillBudget::new(100, Some(40));
        for _ in 0..200 {
            assert_eq!((budget.tokens(0), budget.tokens(1), budget.tokens(9)), (100, 40, 40));
            budget.record_step(1, 40, Duration::from_millis(3));
        }
        assert_eq!(PrefillBudget::new(30, Some(40)).tokens(1), 30);
    }

    #[test]
    fn what_is_unknown_is_measured_first() {
        let mut budget = PrefillBudget::new(500, None);
        assert_eq!(budget.tokens(3), 0);
        budget.record_step(3, 0, Duration::from_millis(10));
        assert_eq!((budget.tokens(3), budget.tokens(4), budget.tokens(2)), (MIN_PREFILL_TOKENS, MIN_PREFILL_TOKENS, 0));
        budget.record_step(3, MIN_PREFILL_TOKENS, Duration::from_millis(11));
        // A millisecond for so many, of the 18 that are left.
        assert_eq!(budget.tokens(3), 18 * MIN_PREFILL_TOKENS);
        for _ in 1..REMEASURE_AFTER {
            budget.record_step(3, 18 * MIN_PREFILL_TOKENS, Duration::from_millis(28));
        }
        assert_eq!(budget.tokens(3), 0, "the texts have become longer");
    }

    #[test]
    fn steps_in_which_sequences_join_are_not_held_up_by_measurements() {
        let mut budget = PrefillBudget::new(500, None);
        budget.record_step(0, 20, Duration::from_millis(20));
        budget.record_step(1, 0, Duration::from_millis(20));
        // Prompts of 20 tokens: 2 join in each step, until 16 generate.
        for generating in (1..16).step_by(2) {
            assert_eq!(budget.tokens(generating), 36, "{generating} generate");
            // 20 and 36 ms, less what rounding may add.
            budget.record_step(generating, 36, Duration::from_micros(55_999));
        }
        // A long prompt follows. How long 16 take is not known yet, and is measured before much of it is read.
        let read = (0..).take_while(|_| {
            let tokens = budget.tokens(16);
            budget.record_step(16, tokens, Duration::from_millis(56));
            tokens > 0
        });
        assert!(read.count() <= JOIN_GRACE_STEPS);
    }
}
