//! One rank of a training. Every rank takes the same steps over the same samples, each with its own tokens.

use super::VideoTraining;
use super::adapter_trainer::{AdapterTrainer, StepSettings};
use crate::error::{Error, Result};
use crate::ranks::RankGroups;
use crate::transformer::FlowSample;
use candle_core::Tensor;
use ringspan_candle::model::UnitWeights;
use ringspan_candle::{CheckpointPolicy, Recompute};
use ringspan_train::checkpoint::{Checkpoints, Progress, Region};
use ringspan_train::data::PackerPosition;
use ringspan_train::{
    LoopEnd, MetricsFile, Optimizer, OptimizerState, StepOutcome, Steps, TrainConfig, TrainingRun, run_steps,
};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// The metrics of one step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct FlowMetrics {
    /// Steps done, this one included: the first is 1.
    pub step: u64,
    /// Mean of `(v - (noise - x0))^2` over the elements of a sample, and over the samples of the step.
    pub loss: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// L2 norm of all gradients before clipping.
    pub grad_norm: f64,
    /// Seconds since this process began training.
    pub seconds: f64,
}

/// What a rank returns: steps done, whether it was stopped, and the matrices of the adapters.
type RankEnd = (u64, bool, BTreeMap<String, Tensor>);

/// The activations that are recomputed.
pub(super) fn recompute(config: &TrainConfig) -> Recompute {
    config.recompute.unwrap_or(Recompute::KeepAttention)
}

/// A rank in the [training loop](run_steps).
struct RankRun<'a> {
    training: &'a VideoTraining<'a>,
    groups: &'a RankGroups,
    trainer: AdapterTrainer<'a>,
    stop: &'a AtomicBool,
    metrics: &'a Mutex<Option<MetricsFile>>,
    on_step: &'a (dyn Fn(&FlowMetrics) + Sync),
    began: Instant,
}

impl TrainingRun for RankRun<'_> {
    type Error = Error;

    /// Whether rank 0 has seen `stop`, which decides for all, so that no rank is left alone in a step.
    fn agreed_to_stop(&mut self) -> Result<bool> {
        self.groups.decided(self.stop.load(Ordering::SeqCst))
    }

    fn step(&mut self, index: u64) -> Result<StepOutcome<Error>> {
        let (training, grad_clip) = (self.training, self.training.config.grad_clip);
        let settings = StepSettings { step: index, lr: training.lr.at(index), grad_clip };
        let (loss, grad_norm) = match self.trainer.step(&training.samples(index)?, settings) {
            // Every rank has the same error, and nothing of the step was kept.
            Err(error @ Error::Train(ringspan_train::Error::Diverged { .. })) => {
                return Ok(StepOutcome::FailedBefore(error));
            }
            done => done?,
        };
        let seconds = self.began.elapsed().as_secs_f64();
        let of_step = FlowMetrics { step: index + 1, loss, lr: settings.lr, grad_norm, seconds };
        if self.groups.rank() == 0 {
            let mut file = self.metrics.lock().unwrap_or_else(PoisonError::into_inner);
            file.iter_mut().try_for_each(|file| file.append(&of_step))?;
            (self.on_step)(&of_step);
        }
        Ok(StepOutcome::Done)
    }

    fn save(&mut self, steps: u64) -> Result<()> {
        self.training.save(self.groups, &self.trainer, steps)
    }
}

impl VideoTraining<'_> {
    pub(super) fn on_rank(
        &self,
        weights: &dyn UnitWeights,
        groups: &RankGroups,
        stop: &AtomicBool,
        metrics: &Mutex<Option<MetricsFile>>,
        on_step: &(dyn Fn(&FlowMetrics) + Sync),
    ) -> Result<RankEnd> {
        let (began, trainer) = (Instant::now(), self.trainer(weights, groups)?);
        let mut run = RankRun { training: self, groups, trainer, stop, metrics, on_step, began };
        let steps = Steps { first: self.first_step(), total: self.lr.steps, save_every: self.config.save_every };
        let LoopEnd { steps, interrupted } = run_steps(&mut run, steps)?;
        Ok((steps, interrupted, run.trainer.matrices()?))
    }

    /// The trainer of new adapters, or of those of a checkpoint.
    fn trainer<'a>(&'a self, weights: &'a dyn UnitWeights, groups: &'a RankGroups) -> Result<AdapterTrainer<'a>> {
        let (config, transformer) = (self.config, self.folder.transformer());
        let (mut matrices, mut state, mut sizes) = (BTreeMap::new(), OptimizerState::new(), Vec::new());
        for (name, shape) in transformer.adapter_shapes() {
            let count = shape.iter().product();
            let values = match &self.resumed {
                Some(checkpoint) => checkpoint.tensors.read(&name, &Region { columns: None, elements: 0..count })?,
                None => self.lora.init(&name, &shape, config.seed),
            };
            matrices.insert(name.clone(), values);
            sizes.push((name, count));
        }
        let optimizer = match &self.resumed {
            Some(checkpoint) => {
                for name in checkpoint.tensors.names().filter(|name| !matrices.contains_key(*name)) {
                    let elements = 0..checkpoint.tensors.len(name).unwrap_or(0);
                    let values = checkpoint.tensors.read(name, &Region { columns: None, elements })?;
                    state.insert(name.to_owned(), Arc::new(values));
                }
                let sizes = sizes.iter().map(|(name, count)| (name.as_str(), *count));
                Optimizer::resume(config.optimizer, state, sizes)?
            }
            None => Optimizer::new(config.optimizer),
        };
        let policy = CheckpointPolicy { recompute: recompute(config), storage: config.activations, offload: None };
        AdapterTrainer::new(transformer, weights, groups, policy, matrices, optimizer)
    }

    /// The samples of a step.
    fn samples(&self, step: u64) -> Result<Vec<FlowSample>> {
        let each = self.config.grad_accumulation as u64;
        (step * each..(step + 1) * each).map(|index| self.data.sample(self.config.seed, index)).collect()
    }

    /// Saves a checkpoint: rank 0 writes, since all ranks have the same adapters, and the others wait.
    fn save(&self, groups: &RankGroups, trainer: &AdapterTrainer, step: u64) -> Result<()> {
        if groups.rank() == 0 {
            let checkpoints = Checkpoints::new(&self.config.out, self.config.keep);
            let (model, data) = (self.model.clone(), self.data_identity.clone());
            let progress = Progress::new(step, PackerPosition::default(), self.config.seed, 0, model, data);
            let pending = checkpoints.begin(step)?;
            checkpoints.write(step, 0, 1, &trainer.slices())?;
            checkpoints.commit(pending, &progress, 1)?;
        }
        Ok(groups.video().cp().barrier()?)
    }
}
