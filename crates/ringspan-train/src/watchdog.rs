//! Notices when a loss stays high.

use crate::error::{Error, Result};

/// Steps that make the first mean: before them a loss is compared with nothing.
const FIRST: u32 = 10;
/// Share of the mean that stays, a step.
const KEPT: f64 = 0.98;

/// Compares losses with their running mean. Every rank has its own and sees the same losses, so all stop together.
#[derive(Debug, Clone)]
pub(crate) struct Watchdog {
    factor: Option<f64>,
    patience: u64,
    mean: f64,
    seen: u32,
    /// Steps in a row above the limit.
    high: u64,
}

impl Watchdog {
    /// Alarms after `patience` steps in a row above `factor` times the mean; never where there is no factor.
    pub(crate) fn new(factor: Option<f64>, patience: u64) -> Self {
        Self { factor, patience, mean: 0.0, seen: 0, high: 0 }
    }

    /// Looks at the loss of `step`. The mean is of the losses below the limit: a spike does not become the measure.
    ///
    /// # Errors
    /// [`Error::Spike`].
    pub(crate) fn look(&mut self, step: u64, loss: f64) -> Result<()> {
        let Some(factor) = self.factor else { return Ok(()) };
        if self.seen >= FIRST && loss > factor * self.mean {
            self.high += 1;
            if self.high >= self.patience {
                return Err(Error::Spike { step, loss, steps: self.high, factor, mean: self.mean });
            }
            return Ok(());
        }
        self.high = 0;
        self.seen = self.seen.saturating_add(1);
        // A plain mean at first, so that the first loss, the highest, does not weigh longest.
        let share = (1.0 / f64::from(self.seen)).max(1.0 - KEPT);
        self.mean += (loss - self.mean) * share;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(watchdog: &mut Watchdog, losses: &[f64]) -> Option<(usize, Error)> {
        losses.iter().enumerate().find_map(|(i, &loss)| watchdog.look(i as u64 + 1, loss).err().map(|e| (i + 1, e)))
    }

    #[test]
    fn a_loss_that_stays_high_is_noticed_and_one_that_comes_back_is_not() {
        let calm: Vec<f64> = (0..40).map(|i| 6.0 - 0.1 * f64::from(i)).collect();
        assert!(feed(&mut Watchdog::new(Some(2.0), 1), &calm).is_none());
        let twice = [&calm[..], &[30.0, 31.0, 2.0, 30.0, 31.0, 2.0]].concat();
        assert!(feed(&mut Watchdog::new(Some(2.0), 3), &twice).is_none());
        let lasting = [&calm[..], &[30.0, 31.0, 32.0, 2.0]].concat();
        let (step, error) = feed(&mut Watchdog::new(Some(2.0), 3), &lasting).expect("noticed");
        assert_eq!(step, 43);
        let message = error.to_string();
        assert!(message.contains("step 43") && message.contains("32") && message.contains("3 steps"), "{message}");
        assert!(feed(&mut Watchdog::new(None, 1), &lasting).is_none());
    }

    #[test]
    fn the_first_steps_are_never_a_spike() {
        assert!(feed(&mut Watchdog::new(Some(1.5), 1), &[1.0, 50.0, 50.0, 50.0]).is_none());
    }
}
