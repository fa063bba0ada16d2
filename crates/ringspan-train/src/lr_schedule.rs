//! The learning rate of each step.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// How the learning rate develops after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LrDecay {
    /// The rate falls to 0 along half a cosine.
    #[default]
    Cosine,
    /// The rate stays at the peak.
    Constant,
}

impl FromStr for LrDecay {
    type Err = ringspan::Error;

    fn from_str(given: &str) -> Result<Self, Self::Err> {
        match given {
            "cosine" => Ok(Self::Cosine),
            "constant" => Ok(Self::Constant),
            _ => Err(ringspan::Error::Unknown { what: "schedule", given: given.into(), possible: "cosine, constant" }),
        }
    }
}

impl fmt::Display for LrDecay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cosine => "cosine",
            Self::Constant => "constant",
        })
    }
}

/// Learning rate over steps `t = 0 .. steps`:
///
/// - `t < warmup`: `peak * (t + 1) / warmup`, so that the first step already learns and the last of the rise is the peak;
/// - then cosine: `peak * (1 + cos(pi * (t - warmup) / (steps - warmup))) / 2`, or constant: `peak`.
///
/// ```
/// use ringspan_train::{LrDecay, LrSchedule};
///
/// let schedule = LrSchedule { peak: 1e-3, warmup: 10, steps: 110, decay: LrDecay::Cosine };
/// assert_eq!([0, 9, 10].map(|step| schedule.at(step)), [1e-4, 1e-3, 1e-3]);
/// assert!((schedule.at(60) - 5e-4).abs() < 1e-12); // half of the cosine
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrSchedule {
    /// The highest rate.
    pub peak: f64,
    /// Number of steps in which the rate rises linearly.
    pub warmup: u64,
    /// Number of steps in all.
    pub steps: u64,
    /// How the rate develops after the rise.
    pub decay: LrDecay,
}

impl LrSchedule {
    /// The rate of step `t`.
    #[must_use]
    pub fn at(&self, t: u64) -> f64 {
        if t < self.warmup {
            return self.peak * (t + 1) as f64 / self.warmup as f64;
        }
        match self.decay {
            LrDecay::Constant => self.peak,
            LrDecay::Cosine => {
                let span = self.steps.saturating_sub(self.warmup).max(1) as f64;
                let elapsed_share = ((t - self.warmup) as f64 / span).min(1.0);
                self.peak * 0.5 * (1.0 + (std::f64::consts::PI * elapsed_share).cos())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_linearly_to_the_peak_and_falls_along_a_cosine() {
        let s = LrSchedule { peak: 2.0, warmup: 4, steps: 14, decay: LrDecay::Cosine };
        let close = |t, x: f64| assert!((s.at(t) - x).abs() < 1e-12, "step {t}: {} is not {x}", s.at(t));
        close(0, 0.5);
        close(2, 1.5);
        close(3, 2.0);
        close(4, 2.0);
        close(9, 1.0);
        close(14, 0.0);
        close(99, 0.0);
        assert!((5..14).all(|t| s.at(t) < s.at(t - 1)));
    }

    #[test]
    fn constant_stays_and_no_warmup_starts_at_the_peak() {
        let s = LrSchedule { peak: 0.1, warmup: 0, steps: 5, decay: LrDecay::Constant };
        assert!((0..9).all(|t| s.at(t) == 0.1));
        assert_eq!(LrSchedule { decay: LrDecay::Cosine, ..s }.at(0), 0.1);
        assert_eq!(LrSchedule { warmup: 9, ..s }.at(7), 0.1 * 8.0 / 9.0);
    }

    #[test]
    fn an_unknown_schedule_is_told_what_is_possible() {
        assert_eq!("cosine".parse::<LrDecay>().unwrap(), LrDecay::Cosine);
        let message = "linear".parse::<LrDecay>().unwrap_err().to_string();
        assert!(message.contains("'linear'") && message.contains("cosine, constant"), "{message}");
    }
}
