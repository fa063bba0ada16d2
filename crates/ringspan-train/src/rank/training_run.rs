//! The steps of one rank of a training, with what is reported and saved between them.

use super::save_checkpoint::PendingSave;
use super::utilization::Utilization;
use super::{Rank, RankOutcome, RankZero};
use crate::{
    data::{Batch, SourcePosition},
    data_loader::DataLoader,
    error::{Error, Result},
    metrics::{EvaluationMetrics, StepMetrics},
    training_loop::{LoopEnd, StepOutcome, Steps, TrainingRun, run_steps},
};
use ringspan::comm::Buffer;
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

/// A rank in the [training loop](run_steps).
struct RankRun<'a, 'r, 'z> {
    rank: Rank<'a>,
    stop: &'r AtomicBool,
    rank_zero: &'r Mutex<RankZero<'z>>,
    began: Instant,
    data_loader: DataLoader,
    /// Where the next step begins in each source.
    positions: Vec<SourcePosition>,
    /// Tokens of all steps that have been taken.
    tokens: u64,
    evaluation: Option<EvaluationMetrics>,
}

impl Rank<'_> {
    /// Trains to the last step, or until rank 0 sees `stop`.
    pub(crate) fn train(self, stop: &AtomicBool, rank_zero: &Mutex<RankZero<'_>>) -> Result<RankOutcome> {
        let (config, setup) = (self.config, self.setup);
        // Peak memory counts from here on: the measurement of the peak rate, in which all ranks took part, is over.
        self.on_rank_zero(rank_zero, |rank_zero| rank_zero.peak_gpu_memory.begin())?;
        let (data_loader, tokens) = (setup.data_loader.clone(), setup.tokens_seen);
        let positions = data_loader.positions();
        let began = Instant::now();
        let mut run = RankRun { rank: self, stop, rank_zero, began, data_loader, positions, tokens, evaluation: None };
        let steps = Steps { first: setup.spec.first_step, total: setup.spec.lr.steps, save_every: config.save_every };
        let LoopEnd { steps, interrupted } = run_steps(&mut run, steps)?;
        if !interrupted {
            run.rank.export()?;
        }
        Ok(RankOutcome { step: steps, interrupted, evaluation: run.evaluation })
    }

    /// Agrees with all ranks: rank 0's flag decides whether to stop, so that no rank is left alone in a step, and a checkpoint is
    /// saved once all ranks have written.
    fn agree(&self, stop: &AtomicBool) -> Result<Agreement> {
        let written = self.saving.as_ref().is_some_and(PendingSave::is_written);
        let views = [stop.load(Ordering::SeqCst), written].map(u64::from);
        let all = self.world.all_gather(Buffer::U64(views.to_vec()))?;
        let view = |buffer: &Arc<Buffer>| match &**buffer {
            Buffer::U64(views) => [0, 1].map(|at| views.get(at) == Some(&1)),
            _ => [false; 2],
        };
        let stop = all.first().is_some_and(|first| view(first)[0]);
        Ok(Agreement { stop, saved: all.iter().all(|buffer| view(buffer)[1]) })
    }
}

/// The decisions that all ranks agree on before a step.
struct Agreement {
    stop: bool,
    /// Whether all files of the checkpoint that is being written are on the disk.
    saved: bool,
}

impl TrainingRun for RankRun<'_, '_, '_> {
    type Error = Error;

    fn agreed_to_stop(&mut self) -> Result<bool> {
        let agreed = self.rank.agree(self.stop)?;
        if agreed.saved {
            self.finish_saving()?;
        }
        Ok(agreed.stop)
    }

    fn step(&mut self, index: u64) -> Result<StepOutcome<Error>> {
        let Self { rank, data_loader, began, .. } = self;
        rank.meter.start();
        let batches = data_loader.next_step(rank.config.grad_accumulation);
        let (loss, grad_norm) = match rank.step(index, &batches) {
            // Every rank returns the same error here, before anything was changed.
            Err(diverged @ Error::Diverged { .. }) => return Ok(StepOutcome::FailedBefore(diverged)),
            loss_and_norm => loss_and_norm?,
        };
        let now: u64 = batches.iter().map(Batch::real_tokens).sum();
        self.tokens += now;
        self.positions = data_loader.positions();
        let Utilization { seconds, peak_share, waited, imbalance } = rank.meter.stop(now)?;
        let mut metrics = StepMetrics {
            step: index + 1,
            loss,
            lr: rank.setup.spec.lr.at(index),
            grad_norm,
            tokens: self.tokens,
            tokens_per_second: now as f64 / seconds,
            peak_share: Some(peak_share),
            waited,
            attention_imbalance: imbalance,
            peak_memory: ringspan::memory::peak(),
            peak_allocated: None,
            peak_gpu_memory: None,
            seconds: began.elapsed().as_secs_f64(),
        };
        rank.on_rank_zero(self.rank_zero, |rank_zero| {
            metrics.peak_allocated = rank_zero.peak_allocated.peak();
            metrics.peak_gpu_memory = rank_zero.peak_gpu_memory.peak()?;
            rank_zero.metrics.iter_mut().try_for_each(|file| file.append(&metrics))?;
            rank_zero.observer.stepped(&metrics);
            Ok(())
        })?;
        Ok(match rank.watchdog.check(index + 1, loss) {
            Ok(()) => StepOutcome::Done,
            Err(spike) => StepOutcome::FailedAfter(spike),
        })
    }

    fn stepped(&mut self, steps: u64) -> Result<()> {
        let is_due = self.rank.config.eval_every.is_some_and(|every| steps.is_multiple_of(every));
        if is_due || steps == self.rank.setup.spec.lr.steps {
            self.evaluation = self.rank.evaluate(steps, self.rank_zero)?;
        }
        Ok(())
    }

    fn save(&mut self, steps: u64) -> Result<()> {
        self.rank.start_saving(self.rank_zero, steps, self.tokens, self.positions.clone())
    }

    fn finish_saving(&mut self) -> Result<()> {
        self.rank.finish_saving(self.rank_zero)
    }
}
