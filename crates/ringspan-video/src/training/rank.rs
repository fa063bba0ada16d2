//! One rank's training loop. Every rank takes the same steps over the same samples, each with its own tokens.

use super::VideoTraining;
use super::adapter_trainer::{AdapterTrainer, StepSettings};
use crate::error::{Error, Result};
use crate::ranks::RankGroups;
use crate::transformer::{FlowSample, UnitWeights};
use candle_core::Tensor;
use ringspan_candle::{CheckpointPolicy, Recompute};
use ringspan_train::checkpoint::{Checkpoints, Progress, Region};
use ringspan_train::data::PackerPosition;
use ringspan_train::{MetricsFile, Optimizer, OptimizerState, TrainConfig};
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

impl VideoTraining<'_> {
    pub(super) fn on_rank(
        &self,
        weights: &dyn UnitWeights,
        groups: &RankGroups,
        stop: &AtomicBool,
        metrics: &Mutex<Option<MetricsFile>>,
        stepped: &(dyn Fn(&FlowMetrics) + Sync),
    ) -> Result<RankEnd> {
        let (began, config) = (Instant::now(), self.config);
        let mut trainer = self.trainer(weights, groups)?;
        let (mut step, mut saved, mut interrupted) = (self.first_step(), self.first_step(), false);
        while step < self.lr.steps {
            if self.agreed_to_stop(groups, stop)? {
                interrupted = true;
                break;
            }
            let settings = StepSettings { step, lr: self.lr.at(step), grad_clip: config.grad_clip };
            let (loss, grad_norm) = match trainer.step(&self.samples(step)?, settings) {
                Err(error @ Error::Train(ringspan_train::Error::Diverged { .. })) => {
                    // Every rank has the same error, and nothing of the step was kept.
                    if saved < step {
                        self.save(groups, &trainer, step)?;
                    }
                    return Err(error);
                }
                done => done?,
            };
            let of_step = FlowMetrics {
                step: step + 1,
                loss,
                lr: settings.lr,
                grad_norm,
                seconds: began.elapsed().as_secs_f64(),
            };
            step += 1;
            if groups.rank() == 0 {
                let mut file = metrics.lock().unwrap_or_else(PoisonError::into_inner);
                file.iter_mut().try_for_each(|file| file.append(&of_step))?;
                stepped(&of_step);
            }
            if config.save_every.is_some_and(|every| step.is_multiple_of(every)) {
                self.save(groups, &trainer, step)?;
                saved = step;
            }
        }
        if saved < step {
            self.save(groups, &trainer, step)?;
        }
        Ok((step, interrupted, trainer.matrices()?))
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

    /// Whether rank 0 has seen `stop`, which decides for all, so that no rank is left alone in a step.
    fn agreed_to_stop(&self, groups: &RankGroups, stop: &AtomicBool) -> Result<bool> {
        groups.decided(stop.load(Ordering::SeqCst))
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
