//! A strategy as a user asks for it: one by name, or the cheapest.

use super::{Choice, Link, Machine, Pass, Schedule, Strategy, StrategyKind, TensorSizes};
use crate::error::{Error, Result};
use std::fmt::{Display, Formatter};
use std::str::FromStr;
use std::sync::Arc;

/// A strategy, or `auto`: the cheapest of the library's by counted bytes and operations.
///
/// ```
/// use ringspan::StrategyKind;
/// use ringspan::schedule::StrategyChoice;
///
/// let choice: StrategyChoice = "auto".parse()?;
/// assert!(choice.is_auto());
/// assert_eq!(StrategyChoice::from(StrategyKind::PassQ).to_string(), "pass-q");
/// # Ok::<_, ringspan::Error>(())
/// ```
#[derive(Debug, Clone)]
pub enum StrategyChoice {
    /// This strategy.
    Fixed(Arc<dyn Strategy>),
    /// The strategy whose [estimate](Schedule::estimate) is least.
    Auto,
}

impl StrategyChoice {
    /// Whether the cheapest strategy is to be chosen.
    pub fn is_auto(&self) -> bool {
        matches!(self, Self::Auto)
    }

    /// Makes the schedule of the fixed strategy, or of the cheapest of all strategies on `machine`. `schedule` makes the
    /// schedule of a strategy. Since estimates are computed from sizes alone, all ranks choose the same.
    ///
    /// # Errors
    /// The errors of `schedule`, and heads that do not fit its grid.
    pub fn schedule(
        &self,
        schedule: impl Fn(Arc<dyn Strategy>) -> Result<Schedule>,
        sizes: &TensorSizes,
        machine: &Machine,
        passes: &[Pass],
    ) -> Result<Schedule> {
        match self {
            Self::Fixed(strategy) => schedule(strategy.clone()),
            Self::Auto => {
                let candidates =
                    StrategyKind::ALL.into_iter().map(|kind| schedule(Arc::new(kind))).collect::<Result<Vec<_>>>()?;
                Ok(Choice::cheapest(candidates, sizes, machine, passes)?.schedule)
            }
        }
    }
}

impl From<StrategyKind> for StrategyChoice {
    fn from(strategy: StrategyKind) -> Self {
        Self::Fixed(Arc::new(strategy))
    }
}

impl From<Arc<dyn Strategy>> for StrategyChoice {
    fn from(strategy: Arc<dyn Strategy>) -> Self {
        Self::Fixed(strategy)
    }
}

impl Display for StrategyChoice {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fixed(strategy) => f.write_str(&strategy.name()),
            Self::Auto => f.write_str("auto"),
        }
    }
}

impl FromStr for StrategyChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let unknown = |_| Error::Unknown {
            what: "strategy",
            given: text.to_owned(),
            possible: "ring, bidirectional-ring, all-gather, halo, pass-q, auto",
        };
        if text == "auto" { Ok(Self::Auto) } else { text.parse::<StrategyKind>().map(Self::from).map_err(unknown) }
    }
}

impl Machine {
    /// Ranks of one machine that compute on CPUs: links of 10 GB/s and 5 microseconds, and 100 GFLOP/s for each thread.
    pub fn cpu(threads: usize) -> Self {
        let link = Link { bandwidth: 10e9, latency: 5e-6 };
        Self { flops: 100e9 * threads.max(1) as f64, ring: link, ulysses: link, line: false }
    }
}
