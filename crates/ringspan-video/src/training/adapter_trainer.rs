//! One rank's adapters and their optimiser.

use crate::error::{Error, Result};
use crate::ranks::RankGroups;
use crate::transformer::{FlowBatch, FlowSample, VideoContext, WanTransformer};
use candle_core::{Device, Tensor};
use ringspan::comm::numbers;
use ringspan_candle::gradients::loss_and_gradients;
use ringspan_candle::lora::layer_of;
use ringspan_candle::model::{Parameter, UnitWeights};
use ringspan_candle::{CheckpointPolicy, StoredWeights, Unit};
use ringspan_train::checkpoint::Slice;
use ringspan_train::{Optimizer, UpdateArguments, clip_scale, sum_of_squares};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The adapters of a transformer in training. Every rank has all of them, and all ranks take the same steps; the frozen weights are
/// shared by the ranks of a process, or each rank has a share of them.
pub struct AdapterTrainer<'a> {
    transformer: &'a WanTransformer,
    frozen: &'a dyn UnitWeights,
    groups: &'a RankGroups,
    policy: CheckpointPolicy<'a>,
    /// The matrices A and B of all adapters, by name.
    matrices: BTreeMap<String, Arc<Vec<f32>>>,
    optimizer: Optimizer,
}

/// Number, learning rate and largest gradient norm of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepSettings {
    /// Number of the step, from 0.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// Limit of the gradient's L2 norm, to which larger ones are scaled down.
    pub grad_clip: Option<f64>,
}

impl<'a> AdapterTrainer<'a> {
    /// A rank's trainer of the adapters of `transformer`, with these matrices and this optimiser.
    ///
    /// # Errors
    /// A matrix that is missing or of another size.
    pub fn new(
        transformer: &'a WanTransformer,
        frozen: &'a dyn UnitWeights,
        groups: &'a RankGroups,
        policy: impl Into<CheckpointPolicy<'a>>,
        mut initial: BTreeMap<String, Vec<f32>>,
        optimizer: Optimizer,
    ) -> Result<Self> {
        let mut matrices = BTreeMap::new();
        for (name, shape) in transformer.adapter_shapes() {
            let values = initial.remove(&name).unwrap_or_default();
            if values.len() != shape.iter().product::<usize>() {
                return Err(Error::Input(format!("{name} has {} elements, and its shape is {shape:?}", values.len())));
            }
            matrices.insert(name, Arc::new(values));
        }
        Ok(Self { transformer, frozen, groups, policy: policy.into(), matrices, optimizer })
    }

    /// Takes a step with the mean of the losses of some samples, the same on all ranks; returns this mean and the norm of its
    /// gradients.
    ///
    /// # Errors
    /// Samples that do not fit the transformer, failures of other ranks; a loss that is not finite, which changes nothing.
    pub fn step(&mut self, samples: &[FlowSample], settings: StepSettings) -> Result<(f64, f64)> {
        let (loss, gradients) = self.loss_and_gradients(samples)?;
        let norm = sum_of_squares(gradients.values().map(Vec::as_slice)).sqrt();
        let StepSettings { step, lr, grad_clip } = settings;
        if !loss.is_finite() || !norm.is_finite() {
            return Err(ringspan_train::Error::Diverged { step: step + 1, loss, norm, lr }.into());
        }
        let arguments = UpdateArguments { step, lr, scale: clip_scale(norm, grad_clip), has_weight_decay: true };
        for (name, gradient) in &gradients {
            if let Some(matrix) = self.matrices.get_mut(name) {
                let matrix: &mut Vec<f32> = Arc::make_mut(matrix);
                self.optimizer.update(name, arguments, matrix, gradient)?;
            }
        }
        Ok((loss, norm))
    }

    /// The mean of the losses of some samples and its gradients, summed over the ranks.
    fn loss_and_gradients(&self, samples: &[FlowSample]) -> Result<(f64, BTreeMap<String, Vec<f32>>)> {
        let mut sums: BTreeMap<String, Vec<f32>> =
            self.matrices.iter().map(|(name, values)| (name.clone(), vec![0.0; values.len()])).collect();
        let share = 1.0 / samples.len().max(1) as f64;
        let mut loss = 0.0;
        for sample in samples {
            let grid = self.transformer.grid_of(sample.shape())?;
            let batch = sample.shape().first().copied().unwrap_or(0);
            let (group, alone) = (self.groups.video().clone(), self.groups.alone().clone());
            let video = VideoContext::new(self.transformer.config(), group, alone, batch, grid)?;
            let batch = FlowBatch::new(self.transformer, sample, &video)?;
            let attend = video.attention();
            loss += share
                * loss_and_gradients(self.transformer, self, &batch, self.policy, attend, &mut |_, gradients| {
                    for (name, gradient) in gradients {
                        let Some(sum) = sums.get_mut(&name) else { continue };
                        let gradient = gradient.flatten_all()?.to_vec1::<f32>()?;
                        sum.iter_mut().zip(gradient).for_each(|(sum, x)| *sum += x * share as f32);
                    }
                    Ok(())
                })?;
        }
        let ranks = self.groups.video().cp();
        // One message for all: most matrices are small.
        let mut flat = sums.values().flatten().copied().collect::<Vec<f32>>();
        ranks.all_reduce(&mut flat)?;
        let mut rest = &flat[..];
        for sum in sums.values_mut() {
            let (own, others) = rest.split_at(sum.len());
            sum.copy_from_slice(own);
            rest = others;
        }
        Ok((numbers::all_reduce(&**ranks, &[loss])?.into_iter().sum(), sums))
    }

    /// The matrices of all adapters, by name.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn matrices(&self) -> Result<BTreeMap<String, Tensor>> {
        let shapes = self.transformer.adapter_shapes();
        let tensor = |(name, values): (&String, &Arc<Vec<f32>>)| {
            let shape = shapes.get(name).cloned().unwrap_or_default();
            Ok((name.clone(), Tensor::from_slice(values, shape, &Device::Cpu)?))
        };
        self.matrices.iter().map(tensor).collect()
    }

    /// What a checkpoint holds: the matrices and the optimiser's state.
    pub(super) fn slices(&self) -> Vec<Slice> {
        let all = self.matrices.iter().chain(self.optimizer.state());
        all.map(|(name, values)| Slice { name: name.clone(), columns: None, start: 0, values: values.clone() })
            .collect()
    }
}

/// The frozen weights, with the matrices of the adapters as they are now.
impl UnitWeights for AdapterTrainer<'_> {
    fn unit(&self, unit: Unit, parameters: &[Parameter]) -> candle_core::Result<StoredWeights> {
        let (adapters, frozen): (Vec<_>, Vec<_>) =
            parameters.iter().cloned().partition(|parameter| layer_of(&parameter.name).is_some());
        let mut weights = self.frozen.unit(unit, &frozen)?;
        for Parameter { name, shape, .. } in adapters {
            let Some(values) = self.matrices.get(&name) else {
                candle_core::bail!("{name} {shape:?} is not among the adapters in training");
            };
            weights.insert(name, Tensor::from_slice(values, shape, &Device::Cpu)?.into());
        }
        Ok(weights)
    }

    fn prefetch(&self, unit: Unit) -> candle_core::Result<()> {
        self.frozen.prefetch(unit)
    }
}
