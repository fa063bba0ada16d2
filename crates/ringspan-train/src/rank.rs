//! One rank's training loop. Every rank runs the same steps over the same batches and takes its own part of each.

use crate::{
    checkpoint::{Checkpoints, Progress},
    config::TrainConfig,
    data::Batch,
    error::{Error, Result},
    hidden::hidden,
    metrics::{EvaluationMetrics, MetricsFile, StepMetrics},
    observer::Observer,
    optimizer::{Optimizer, Update, clip_scale, global_norm},
    setup::{Setup, model_error},
};
use candle_core::{Device, Tensor};
use ringspan::{
    Group, Kernel, Layout, Mesh,
    comm::{Buffer, Communicator},
};
use ringspan_candle::{context::Context, loss};
use ringspan_models::{Weights, gradients};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

/// What only rank 0 does: files and people.
pub(crate) struct Host<'a> {
    pub(crate) observer: &'a mut dyn Observer,
    pub(crate) metrics: MetricsFile,
    pub(crate) checkpoints: Checkpoints,
}

/// How a rank's loop ended.
pub(crate) struct End {
    pub(crate) step: u64,
    pub(crate) interrupted: bool,
    pub(crate) weights: Weights,
    pub(crate) evaluation: Option<EvaluationMetrics>,
}

/// A rank, its parameters and its optimiser.
pub(crate) struct Rank<'a> {
    config: &'a TrainConfig,
    setup: &'a Setup,
    world: Arc<dyn Communicator>,
    /// The ranks that share this rank's sequences.
    group: Arc<Group>,
    /// Which part of a batch's rows these ranks take.
    replica: usize,
    weights: Weights,
    optimizer: Optimizer,
}

impl<'a> Rank<'a> {
    pub(crate) fn new(config: &'a TrainConfig, setup: &'a Setup, world: Arc<dyn Communicator>) -> Result<Self> {
        let mesh = mesh(config)?;
        let replica = mesh.coordinates(world.rank())[0];
        let cp = world.split(replica, world.rank())?;
        let group = Arc::new(Group::new(cp, (config.ring, config.ulysses), Kernel::new(config.threads))?);
        let (weights, optimizer) = (setup.weights.clone(), setup.optimizer.clone());
        Ok(Self { config, setup, world, group, replica, weights, optimizer })
    }

    /// Trains to the last step, or until rank 0 sees `stop`.
    pub(crate) fn train(mut self, stop: &AtomicBool, host: &Mutex<Host<'_>>) -> Result<End> {
        let began = Instant::now();
        let (config, setup) = (self.config, self.setup);
        let mut feed = setup.feed.clone();
        let (mut step, mut tokens) = (setup.first_step, setup.tokens);
        let (mut saved, mut evaluation, mut interrupted) = (None, None, false);
        while step < config.lr.steps {
            if self.agree_to_stop(stop)? {
                interrupted = true;
                break;
            }
            let started = Instant::now();
            let batches = feed.next_step(config.grad_accumulation);
            let (loss, grad_norm) = self.step(step, &batches)?;
            let now: u64 = batches.iter().map(Batch::real_tokens).sum();
            tokens += now;
            let metrics = StepMetrics {
                step: step + 1,
                loss,
                lr: config.lr.at(step),
                grad_norm,
                tokens,
                tokens_per_second: now as f64 / started.elapsed().as_secs_f64().max(1e-9),
                seconds: began.elapsed().as_secs_f64(),
            };
            step += 1;
            self.on_host(host, |host| {
                host.metrics.append(&metrics)?;
                host.observer.stepped(&metrics);
                Ok(())
            })?;
            let due = |every: Option<u64>| every.is_some_and(|n| step.is_multiple_of(n));
            if due(config.eval_every) || step == config.lr.steps {
                evaluation = self.look_at_held_out(step, host)?;
            }
            if due(config.save_every) {
                self.save(host, step, tokens, &feed)?;
                saved = Some(step);
            }
        }
        if saved != Some(step) && step > setup.first_step {
            self.save(host, step, tokens, &feed)?;
        }
        Ok(End { step, interrupted, weights: self.weights, evaluation })
    }

    /// Rank 0's flag decides, so that no rank is left alone in a step.
    fn agree_to_stop(&self, stop: &AtomicBool) -> Result<bool> {
        let flag = (self.world.rank() == 0).then(|| Buffer::U64(vec![u64::from(stop.load(Ordering::SeqCst))]));
        Ok(*self.world.broadcast(0, flag)? == Buffer::U64(vec![1]))
    }

    fn on_host(&self, host: &Mutex<Host<'_>>, f: impl FnOnce(&mut Host<'_>) -> Result<()>) -> Result<()> {
        if self.world.rank() != 0 {
            return Ok(());
        }
        f(&mut host.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// One step of the optimiser over the micro-batches; mean loss per target and gradient norm, the same on every rank.
    fn step(&mut self, step: u64, batches: &[Batch]) -> Result<(f64, f64)> {
        // Known before any rank computes, so gradients are scaled once and simply add up over ranks and micro-batches.
        let valid: u64 = batches.iter().map(Batch::valid_targets).sum();
        let scale = 1.0 / valid.max(1) as f32;
        let mut own: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        let mut summed: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        let mut nll = 0.0;
        for (index, batch) in batches.iter().enumerate() {
            let last = index + 1 == batches.len();
            let local = self.local(batch)?;
            nll += gradients::loss_and_gradients(
                &self.setup.decoder,
                &self.weights,
                &local.tokens,
                &local.targets,
                scale,
                self.config.recompute,
                &local.context,
                &mut |name, gradient| {
                    let mut gradient: Vec<f32> = gradient.flatten_all()?.to_vec1()?;
                    if let Some(before) = own.remove(name) {
                        gradient.iter_mut().zip(before).for_each(|(sum, g)| *sum += g);
                    }
                    if last {
                        self.world.all_reduce(&mut gradient).map_err(candle_core::Error::wrap)?;
                        summed.insert(name.to_string(), gradient);
                    } else {
                        own.insert(name.to_string(), gradient);
                    }
                    Ok(())
                },
            )
            .map_err(model_error)?;
        }
        let loss = self.sum(nll)? / valid.max(1) as f64;
        let norm = global_norm(summed.values().map(Vec::as_slice));
        let lr = self.config.lr.at(step);
        if !loss.is_finite() || !norm.is_finite() {
            return Err(Error::Diverged { step: step + 1, loss, lr });
        }
        let clip = clip_scale(norm, self.config.grad_clip);
        for (name, gradient) in &summed {
            let Some(tensor) = self.weights.get(name) else {
                return Err(Error::Model(format!("a gradient came for `{name}`, which is no parameter")));
            };
            let shape = tensor.shape().clone();
            let mut values: Vec<f32> = tensor.flatten_all()?.to_vec1()?;
            // Biases and norms are vectors: pulling them to 0 regularises nothing.
            let decays = shape.rank() > 1;
            let at = Update { step, lr, scale: clip, decays };
            self.optimizer.update(name, at, &mut values, gradient)?;
            self.weights.insert(name.clone(), Tensor::from_vec(values, shape, &Device::Cpu)?);
        }
        Ok((loss, norm))
    }

    /// This rank's tokens of a batch.
    fn local(&self, batch: &Batch) -> Result<Local> {
        let part = batch.part(self.replica, self.config.dp_replicate);
        let layout = Layout::new(self.config.layout, &part.documents()?, self.group.size())?;
        let rank = self.group.rank();
        let tokens = layout.shard(rank, &part.tokens, 1)?;
        let targets = layout.shard(rank, &part.targets, 1)?;
        let context = Context::new(self.group.clone(), Arc::new(layout), self.config.strategy)?;
        Ok(Local { tokens, targets, context })
    }

    /// Sums one number over all ranks, in f64 and in rank order.
    fn sum(&self, value: f64) -> Result<f64> {
        let all = self.world.all_gather(Buffer::U64(vec![value.to_bits()]))?;
        Ok(all
            .iter()
            .map(|buffer| match &**buffer {
                Buffer::U64(bits) => bits.iter().map(|&b| f64::from_bits(b)).sum(),
                _ => f64::NAN,
            })
            .sum())
    }

    fn look_at_held_out(&self, step: u64, host: &Mutex<Host<'_>>) -> Result<Option<EvaluationMetrics>> {
        let sequences = &self.setup.held_out;
        let Some(length) = sequences.iter().map(|s| s.tokens.len()).max() else { return Ok(None) };
        let (mut nll, mut targets) = (0.0, 0);
        for rows in sequences.chunks(self.config.batch_size) {
            let batch = Batch::new(rows, length);
            targets += batch.valid_targets();
            let local = self.local(&batch)?;
            let hidden = hidden(&self.setup.decoder, &self.weights, &local.tokens, &local.context)?;
            let head = self.setup.decoder.head(&self.weights).map_err(model_error)?;
            let log_probs = loss::log_probs(&hidden, &head, &local.targets)?;
            nll -= log_probs.iter().map(|&x| f64::from(x)).sum::<f64>();
        }
        if targets == 0 {
            return Ok(None);
        }
        let held_out_loss = self.sum(nll)? / targets as f64;
        let metrics = EvaluationMetrics {
            step,
            held_out_loss,
            held_out_perplexity: held_out_loss.exp(),
            held_out_targets: targets,
        };
        self.on_host(host, |host| {
            host.metrics.append(&metrics)?;
            host.observer.evaluated(&metrics);
            Ok(())
        })?;
        Ok(Some(metrics))
    }

    /// Rank 0 writes; the others meet it again in the next collective, so the deadline must outlast a save.
    fn save(&self, host: &Mutex<Host<'_>>, step: u64, tokens: u64, feed: &crate::feed::Feed) -> Result<()> {
        self.on_host(host, |host| {
            let (model, data) = (self.setup.model.clone(), self.setup.data.clone());
            let progress = Progress::new(step, feed.position(), self.config.seed, tokens, model, data);
            let values = |name: &str| match self.weights.get(name) {
                Some(tensor) => Ok(tensor.flatten_all()?.to_vec1()?),
                None => Err(Error::Model(format!("parameter `{name}` is missing"))),
            };
            let path = host.checkpoints.save(&progress, &self.setup.shapes, values, self.optimizer.state())?;
            host.observer.saved(step, &path);
            Ok(())
        })
    }
}

struct Local {
    tokens: Vec<u32>,
    targets: Vec<u32>,
    context: Context,
}

/// The mesh of a run, outermost axis first.
pub(crate) fn mesh(config: &TrainConfig) -> Result<Mesh> {
    Ok(Mesh::new(&[("dp_replicate", config.dp_replicate), ("ring", config.ring), ("ulysses", config.ulysses)])?)
}
