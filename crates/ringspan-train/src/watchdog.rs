//! Notices when the loss stays high (a loss spike).

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Number of losses in the first mean: before it is complete, a loss is compared with nothing.
const WARMUP_LOSSES: u32 = 10;
/// Weight of the old mean when a loss enters the running mean.
const MEAN_DECAY: f64 = 0.98;

/// Statistics of the losses so far. They are kept in checkpoints, so that a resumed run knows which losses are high.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct LossStatistics {
    /// Running mean of the losses.
    pub mean: f64,
    /// Number of losses in the mean.
    pub seen: u32,
    /// Number of consecutive steps above the limit.
    pub high: u64,
}

/// Compares losses with their running mean. Every rank has its own watchdog and sees the same losses, so all stop together.
#[derive(Debug, Clone)]
pub(crate) struct Watchdog {
    factor: Option<f64>,
    patience: u64,
    losses: LossStatistics,
}

impl Watchdog {
    /// A watchdog that gives an error after `patience` consecutive steps above `factor` times the mean; never without a factor.
    /// `losses` are the statistics of the steps before.
    pub(crate) fn new(factor: Option<f64>, patience: u64, losses: LossStatistics) -> Self {
        Self { factor, patience, losses }
    }

    /// The statistics of the losses so far.
    pub(crate) fn losses(&self) -> LossStatistics {
        self.losses
    }

    /// Compares the loss of `step` with the mean. Only losses below the limit enter the mean, so a spike does not raise it. The
    /// mean is also kept where there is no limit, for a resumed run that has one.
    ///
    /// # Errors
    /// [`Error::Spike`]. The statistics then begin anew, for a run that is resumed: the loss may have settled at its new level,
    /// and the old mean, which would no longer move, would stop each further run as well.
    pub(crate) fn check(&mut self, step: u64, loss: f64) -> Result<()> {
        let LossStatistics { mean, seen, high } = &mut self.losses;
        if let Some(factor) = self.factor.filter(|factor| *seen >= WARMUP_LOSSES && loss > factor * *mean) {
            *high += 1;
            if *high >= self.patience {
                let LossStatistics { mean, high: steps, .. } = std::mem::take(&mut self.losses);
                return Err(Error::Spike { step, loss, steps, factor, mean });
            }
            return Ok(());
        }
        *high = 0;
        *seen = seen.saturating_add(1);
        // The mean is a plain one at first, so that the first loss, the highest, does not keep the largest weight.
        let weight = (1.0 / f64::from(*seen)).max(1.0 - MEAN_DECAY);
        *mean += (loss - *mean) * weight;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watchdog(factor: Option<f64>, patience: u64) -> Watchdog {
        Watchdog::new(factor, patience, LossStatistics::default())
    }

    fn feed(watchdog: &mut Watchdog, losses: &[f64]) -> Option<(usize, Error)> {
        losses.iter().enumerate().find_map(|(i, &loss)| watchdog.check(i as u64 + 1, loss).err().map(|e| (i + 1, e)))
    }

    #[test]
    fn a_loss_that_stays_high_is_noticed_and_one_that_comes_back_is_not() {
        let calm: Vec<f64> = (0..40).map(|i| 6.0 - 0.1 * f64::from(i)).collect();
        assert!(feed(&mut watchdog(Some(2.0), 1), &calm).is_none());
        let twice = [&calm[..], &[30.0, 31.0, 2.0, 30.0, 31.0, 2.0]].concat();
        assert!(feed(&mut watchdog(Some(2.0), 3), &twice).is_none());
        let lasting = [&calm[..], &[30.0, 31.0, 32.0, 2.0]].concat();
        let (step, error) = feed(&mut watchdog(Some(2.0), 3), &lasting).expect("noticed");
        assert_eq!(step, 43);
        let message = error.to_string();
        assert!(message.contains("step 43") && message.contains("32") && message.contains("3 steps"), "{message}");
        assert!(feed(&mut watchdog(None, 1), &lasting).is_none());
    }

    #[test]
    fn the_first_steps_are_never_a_spike() {
        assert!(feed(&mut watchdog(Some(1.5), 1), &[1.0, 50.0, 50.0, 50.0]).is_none());
    }

    /// A run that is stopped and resumed anywhere notices the same spike; one that had no limit has a mean when it is given one.
    #[test]
    fn a_resumed_run_goes_on_with_the_saved_statistics() {
        let losses: Vec<f64> = (0..20).map(|i| 3.0 + f64::from(i % 3)).chain([30.0, 31.0, 32.0]).collect();
        let noticed = feed(&mut watchdog(Some(2.0), 3), &losses).map(|(step, _)| step);
        assert_eq!(noticed, Some(23));
        for cut in [1, 9, 10, 15, 21, 22] {
            for factor in [None, Some(2.0)] {
                let mut first = watchdog(factor, 3);
                assert!(feed(&mut first, &losses[..cut.min(20)]).is_none());
                if factor.is_some() {
                    assert!(feed(&mut first, &losses[cut.min(20)..cut]).is_none());
                }
                let kept = serde_json::to_string(&first.losses()).expect("numbers");
                let mut second = Watchdog::new(Some(2.0), 3, serde_json::from_str(&kept).expect("numbers"));
                let from = if factor.is_some() { cut } else { cut.min(20) };
                let noticed = feed(&mut second, &losses[from..]).map(|(step, _)| step + from);
                assert_eq!(noticed, Some(23), "cut at {cut}, {factor:?}");
                assert_eq!(second.losses(), LossStatistics::default(), "who goes on begins anew");
            }
        }
    }

    /// The spike is noticed once, whether the run is stopped and resumed at the error or not.
    #[test]
    fn a_loss_that_settled_higher_is_noticed_once() {
        let settled = |i: u32| 30.0 + 0.1 * f64::from(i % 7);
        let mut before = watchdog(Some(2.0), 3);
        let losses: Vec<f64> = [3.0; 20].into_iter().chain((0..3).map(settled)).collect();
        assert_eq!(feed(&mut before, &losses).map(|(step, _)| step), Some(23));
        for mut after in [before.clone(), Watchdog::new(Some(2.0), 3, before.losses())] {
            let on: Vec<f64> = (0..100).map(settled).collect();
            assert!(feed(&mut after, &on).is_none());
            // The mean is of the new level, above which there are spikes again.
            let (step, error) = feed(&mut after, &[70.0, 71.0, 72.0]).expect("noticed");
            assert_eq!((step, error.to_string().contains("times its mean 30.")), (3, true), "{error}");
        }
    }
}
