//! One step of the optimiser, and evaluation on the held-out text.

use super::{Groups, Rank, RankZero};
use crate::{
    config::RouterLossScope,
    data::Batch,
    error::{Error, Result, model_error},
    hidden_states::{hidden_states, hidden_states_prefetching},
    metrics::EvaluationMetrics,
    optimizer::{UpdateArguments, clip_scale, sum_of_squares},
    shards::{GradientShards, Sums},
};
use candle_core::Tensor;
use ringspan::{
    Layout,
    comm::{Buffer, Communicator, numbers},
};
use ringspan_candle::{
    CheckpointPolicy, ExpertLoad, Experts, InputDropout, LoadBalancedExperts, ParallelRank, StoredWeights, Unit,
    context::Context, gradients::TrainableModel, gradients::loss_and_gradients, tensor_parallel,
};
use ringspan_models::TokenBatch;
use std::{
    ops::Range,
    sync::{Arc, Mutex},
};

/// The rows of a batch that a data-parallel rank takes, and how its context-parallel ranks share their tokens.
struct BatchRows {
    /// The elements of the rows in the batch.
    elements: Range<usize>,
    layout: Layout,
}

/// This rank's tokens of a batch.
struct LocalBatch {
    tokens: Vec<u32>,
    targets: Vec<u32>,
    context: Context,
    /// Index in the batch of the first token of the rows that this rank shares with others.
    first_token: usize,
}

/// The results of a step's forward and backward passes, before the update.
pub(crate) struct LossAndGradients {
    pub(crate) loss: f64,
    pub(crate) gradients: Sums,
}

impl Rank<'_> {
    /// Runs one step of the optimiser over the micro-batches and returns the loss and the gradient norm, the same on every rank.
    pub(super) fn step(&mut self, step: u64, batches: &[Batch]) -> Result<(f64, f64)> {
        let LossAndGradients { loss, gradients } = self.loss_and_gradients(step, batches)?;
        let norm = self.update(step, loss, &gradients)?;
        Ok((loss, norm))
    }

    /// Computes the loss of a step's micro-batches, the same on every rank, and this rank's shards of the gradients.
    ///
    /// The loss is the mean per target, plus the router's auxiliary loss where the model has one.
    pub(crate) fn loss_and_gradients(&mut self, step: u64, batches: &[Batch]) -> Result<LossAndGradients> {
        // The number of targets is known before any rank computes, so gradients are scaled once and simply add up over ranks and
        // micro-batches.
        let valid: u64 = batches.iter().map(Batch::valid_targets).sum();
        let scale = 1.0 / valid.max(1) as f32;
        let mut summed = GradientShards::new(&self.shards);
        let mut nll = 0.0;
        let mut router_losses = Vec::new();
        let is_balanced = self.setup.spec.decoder.config().router_aux_loss().is_some_and(|factor| factor > 0.0);
        let over_step = is_balanced && batches.len() > 1 && self.config.router_loss_scope == RouterLossScope::Step;
        // Router loads of the micro-batches; the first one's becomes known in its own pass, before the others' passes.
        let mut loads = if over_step { self.loads(step, batches)? } else { Vec::new() };
        for index in 0..batches.len() {
            let mut local = self.local_with_dropout(step, batches, index)?;
            self.meter.add(self.setup, &local.context)?;
            let share = if over_step { 1.0 } else { 1.0 / batches.len() as f64 };
            let mut others = ExpertLoad::default();
            loads.iter().enumerate().filter(|(other, _)| *other != index).for_each(|(_, load)| others.add(load));
            let balanced = self.balanced(share).map(|balanced| Arc::new(balanced.with_other_load(others)));
            if let Some(balanced) = &balanced {
                local.context = local.context.with_experts(balanced.clone());
            }
            nll += loss_and_gradients(
                &self.setup.spec.decoder,
                &self.shards,
                &TokenBatch { tokens: &local.tokens, targets: &local.targets, scale },
                CheckpointPolicy {
                    recompute: self.recompute,
                    storage: self.config.activations,
                    offload: self.offload.as_ref(),
                },
                &local.context,
                &mut |unit, gradients| summed.add(unit, gradients).map_err(candle_core::Error::wrap),
            )
            .map_err(model_error)?;
            router_losses.extend(balanced.as_ref().and_then(|balanced| balanced.loss()));
            if let (Some(load), Some(balanced)) = (loads.get_mut(index), &balanced) {
                *load = balanced.load().unwrap_or_default();
            }
        }
        let gradients = summed.finish()?;
        // Over a step, each micro-batch's auxiliary loss is that of the whole step, so one of them counts.
        let counted = if over_step { 1 } else { router_losses.len() };
        let router_loss: f64 = router_losses.iter().take(counted).sum();
        let loss = sum(&*self.groups.losses, nll)? / valid.max(1) as f64 + router_loss;
        Ok(LossAndGradients { loss, gradients })
    }

    /// Updates this rank's shards and returns the norm of the gradients, the same on every rank.
    pub(crate) fn update(&mut self, step: u64, loss: f64, gradients: &Sums) -> Result<f64> {
        let squares = self.shards.sum_of_squares(gradients, |shard| sum_of_squares([shard]));
        let norm = sum(&**self.shards.copy(), squares)?.sqrt();
        let lr = self.setup.spec.lr.at(step);
        if !loss.is_finite() || !norm.is_finite() {
            return Err(Error::Diverged { step: step + 1, loss, norm, lr });
        }
        self.written()?;
        let clip = clip_scale(norm, self.config.grad_clip);
        let optimizer = &mut self.optimizer;
        self.shards.update(gradients, |partition_shard, values, gradient| {
            // Biases and norms are vectors, and do not decay: pulling them to 0 regularises nothing.
            let has_weight_decay = partition_shard.partition.whole.len() > 1;
            optimizer.update(
                &partition_shard.partition.key(),
                UpdateArguments { step, lr, scale: clip, has_weight_decay },
                values,
                gradient,
            )
        })?;
        Ok(norm)
    }

    /// Router loads of each micro-batch of a step, over all ranks. That of the first micro-batch is left empty: its own pass
    /// comes before the others' and tells it. Returns nothing where the model has no auxiliary loss.
    ///
    /// The gradient of a router probability grows with how often the step chooses its expert, which must be known before the
    /// first backward pass; so the other micro-batches pass forward once more.
    fn loads(&self, step: u64, batches: &[Batch]) -> Result<Vec<ExpertLoad>> {
        let decoder = &self.setup.spec.decoder;
        let mut loads = Vec::new();
        for index in 0..batches.len() {
            let Some(balanced) = self.balanced(0.0).map(Arc::new) else { return Ok(Vec::new()) };
            if index > 0 {
                let LocalBatch { tokens, context, .. } = self.local_with_dropout(step, batches, index)?;
                let context = context.with_experts(balanced.clone());
                hidden_states_prefetching(Unit::Embedding, decoder, &self.shards, &tokens, &context)
                    .map_err(model_error)?;
                balanced.forward_ended(decoder.experts())?;
            }
            loads.push(balanced.load().unwrap_or_default());
        }
        Ok(loads)
    }

    /// The experts with an auxiliary loss that balances their load over all ranks, where the model asks for it; `share` scales
    /// its factor.
    fn balanced(&self, share: f64) -> Option<LoadBalancedExperts> {
        let coefficient = self.setup.spec.decoder.config().router_aux_loss()? * share;
        let world = self.world.clone();
        let sum_over_ranks = move |values: &mut [f64]| {
            values.copy_from_slice(&numbers::all_reduce(&*world, values).map_err(candle_core::Error::wrap)?);
            Ok(())
        };
        Some(LoadBalancedExperts::new(self.groups.experts.clone(), coefficient, sum_over_ranks))
    }

    /// This rank's tokens of a micro-batch, with the dropout of a training step, where adapters or attention have any.
    ///
    /// Dropout follows from the tokens' indices among all elements of the step's batches, which every mesh fills with the same
    /// tokens.
    fn local_with_dropout(&self, step: u64, batches: &[Batch], index: usize) -> Result<LocalBatch> {
        let (decoder, local) = (&self.setup.spec.decoder, self.local(&batches[index])?);
        if decoder.lora().is_none_or(|lora| lora.dropout == 0.0) && decoder.config().attention_dropout() == 0.0 {
            return Ok(local);
        }
        let before: usize = batches[..index].iter().map(|batch| batch.tokens.len()).sum();
        let first = before + local.first_token;
        let rows = local.context.layout().rows(self.groups.cp.rank());
        let tokens = rows.into_iter().map(|row| first + row).collect();
        // Seed and step share a word, and do not meet before one of them fills half of it.
        let seed = self.config.seed.rotate_left(32) ^ step;
        let dropout = InputDropout::new(seed, tokens).in_batch_from(first);
        Ok(LocalBatch { context: local.context.with_input_dropout(dropout), ..local })
    }

    /// This rank's tokens of a batch, and the attention through which they see those of other ranks.
    fn local(&self, batch: &Batch) -> Result<LocalBatch> {
        let Groups { cp, tensor, experts, .. } = &self.groups;
        let BatchRows { elements, layout } = self.rows(batch, self.world.rank())?;
        let first_token = elements.start;
        let tokens = layout.shard(cp.rank(), &batch.tokens[elements.clone()], 1)?;
        let targets = layout.shard(cp.rank(), &batch.targets[elements], 1)?;
        // A rotary base may depend on the sequence length, which must not depend on how rows are distributed: it is the length of the
        // rows, not that of the longest document in a part.
        let context = Context::new(cp.clone(), Arc::new(layout), self.config.strategy)?
            .with_max_length(batch.length)
            .with_tensor_parallel(tensor.clone())
            .with_experts(experts.clone());
        Ok(LocalBatch { tokens, targets, context, first_token })
    }

    /// The rows of a batch that a rank takes.
    fn rows(&self, batch: &Batch, rank: usize) -> Result<BatchRows> {
        let (_, index) = self.setup.spec.mesh.topology.color_and_key(rank, "dp")?;
        let rows = batch.chunk_rows(index, self.config.data_ranks());
        let elements = batch.elements_of(&rows);
        let layout = Layout::new(self.config.layout, &batch.documents_of(rows)?, self.groups.cp.size())?;
        Ok(BatchRows { elements, layout })
    }

    /// Hidden states of this rank's tokens `[T, C]` after the last norm, and the parameters of the output head.
    fn last(&self, local: &LocalBatch) -> Result<(Tensor, StoredWeights)> {
        let decoder = &self.setup.spec.decoder;
        let last = hidden_states(decoder, &self.shards, &local.tokens, &local.context).map_err(model_error)?;
        let head = decoder.head_weights(&self.shards).map_err(model_error)?;
        let last = decoder.norm(&head, &last).map_err(model_error)?;
        let last = self.groups.tensor.gather(&last, local.tokens.len())?;
        Ok((last, head))
    }

    /// The logits of a batch `[B * S, V]`, 0 in padding, gathered from all ranks on every rank.
    pub(crate) fn logits(&self, batch: &Batch) -> Result<Vec<f32>> {
        let local = self.local(batch)?;
        let (last, head) = self.last(&local)?;
        let own = self.setup.spec.decoder.model().head().logits(&last, &head)?.flatten_all()?.to_vec1()?;
        let vocabulary = self.setup.spec.decoder.config().vocab_size;
        let mut logits = vec![0.0; batch.tokens.len() * vocabulary];
        for (rank, of_rank) in self.world.all_gather(Buffer::F32(own))?.iter().enumerate() {
            let ParallelRank { tp: (at, ranks), .. } = self.setup.spec.mesh.parallel_rank(rank);
            let known = tensor_parallel::part(vocabulary, at, ranks);
            let BatchRows { elements, layout } = self.rows(batch, rank)?;
            let mut wide = Vec::new();
            for row in of_rank.f32()?.chunks_exact(known.len()) {
                wide.extend(std::iter::repeat_n(0.0, known.start).chain(row.iter().copied()));
                wide.extend(std::iter::repeat_n(0.0, vocabulary - known.end));
            }
            let mut of_rows = vec![0.0; elements.len() * vocabulary];
            let (_, cp_rank) = self.setup.spec.mesh.topology.color_and_key(rank, "cp")?;
            layout.unshard(cp_rank, &wide, vocabulary, &mut of_rows)?;
            let logits = &mut logits[elements.start * vocabulary..elements.end * vocabulary];
            logits.iter_mut().zip(of_rows).for_each(|(sum, x)| *sum += x);
        }
        Ok(logits)
    }

    /// Computes the loss on the held-out text, records it and reports it; `None` without such text.
    pub(super) fn evaluate(&self, step: u64, rank_zero: &Mutex<RankZero<'_>>) -> Result<Option<EvaluationMetrics>> {
        let sequences = &self.setup.held_out;
        let Some(length) = sequences.iter().map(|s| s.tokens.len()).max() else { return Ok(None) };
        let (mut nll, mut targets) = (0.0, 0);
        for rows in sequences.chunks(self.config.batch_size) {
            let batch = Batch::new(rows, length);
            targets += batch.valid_targets();
            let local = self.local(&batch)?;
            let (last, head) = self.last(&local)?;
            let output = self.setup.spec.decoder.model().head();
            let log_probs = output.log_probs(&last, &local.targets, &head, &self.groups.tensor)?;
            nll -= log_probs.iter().map(|&x| f64::from(x)).sum::<f64>();
        }
        if targets == 0 {
            return Ok(None);
        }
        let held_out_loss = sum(&*self.groups.losses, nll)? / targets as f64;
        let metrics = EvaluationMetrics {
            step,
            held_out_loss,
            held_out_perplexity: held_out_loss.exp(),
            held_out_targets: targets,
        };
        self.on_rank_zero(rank_zero, |rank_zero| {
            rank_zero.metrics.iter_mut().try_for_each(|file| file.append(&metrics))?;
            rank_zero.observer.evaluated(&metrics);
            Ok(())
        })?;
        Ok(Some(metrics))
    }
}

/// Sums one number over the ranks of a group, in f64 and in rank order.
fn sum(group: &dyn Communicator, value: f64) -> Result<f64> {
    Ok(numbers::all_reduce(group, &[value])?.into_iter().sum())
}
