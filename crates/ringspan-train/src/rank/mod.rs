//! One rank's training loop. Every rank runs the same steps over the same batches and takes its own part of each.

mod export;
mod groups;
mod save_checkpoint;
mod step;
mod utilization;

use crate::{
    checkpoint::Checkpoints,
    config::TrainConfig,
    data::Batch,
    error::{Error, Result},
    metrics::{EvaluationMetrics, MetricsFile, StepMetrics},
    observer::Observer,
    optimizer::Optimizer,
    peak_memory::{PeakAllocated, PeakGpuMemory},
    setup::Setup,
    shards::{PartitionShard, Shards, SharedGathers},
    watchdog::Watchdog,
};
use groups::Groups;
use ringspan::comm::{Buffer, Communicator, timed::Timed};
use ringspan_candle::{Devices, Offload, Recompute};
use save_checkpoint::PendingSave;
use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};
pub(crate) use step::LossAndGradients;
use utilization::{Utilization, UtilizationMeter};

/// The objects that only rank 0 uses: the observer, the metrics file, and the counts of memory.
pub(crate) struct RankZero<'a> {
    pub(crate) observer: &'a mut dyn Observer,
    /// None in a process without rank 0.
    pub(crate) metrics: Option<MetricsFile>,
    pub(crate) peak_allocated: PeakAllocated,
    pub(crate) peak_gpu_memory: PeakGpuMemory,
}

/// The state in which a rank's training loop ended.
pub(crate) struct RankOutcome {
    pub(crate) step: u64,
    pub(crate) interrupted: bool,
    pub(crate) evaluation: Option<EvaluationMetrics>,
}

/// A rank, its shards of the parameters, and its optimiser.
pub(crate) struct Rank<'a> {
    config: &'a TrainConfig,
    setup: &'a Setup,
    recompute: Recompute,
    world: Arc<dyn Communicator>,
    groups: Groups,
    shards: Shards,
    /// The ranks that write checkpoint files, rising.
    writers: Vec<usize>,
    optimizer: Optimizer,
    /// Offloads stored activations to CPU memory and copies them back; none where they stay on the GPU.
    offload: Option<Offload>,
    checkpoints: Checkpoints,
    /// The checkpoint that is being written.
    saving: Option<PendingSave>,
    meter: UtilizationMeter,
    watchdog: Watchdog,
}

impl<'a> Rank<'a> {
    /// The rank of `world`, which computes on its device of `devices` and recomputes `recompute` for the backward pass. All ranks get
    /// the same [`Setup::shared_gathers`].
    pub(crate) fn new(
        config: &'a TrainConfig,
        setup: &'a Setup,
        recompute: Recompute,
        devices: &Devices,
        shared_gathers: Option<Arc<SharedGathers>>,
        world: Arc<dyn Communicator>,
    ) -> Result<Self> {
        let (decoder, mesh, device) = (&setup.spec.decoder, &setup.spec.mesh, devices.of(world.rank()));
        let timed = Arc::new(Timed::new(world));
        let world: Arc<dyn Communicator> = timed.clone();
        let groups = Groups::new(config, mesh, decoder.experts(), device, &world)?;
        let read = |partition_shard: &PartitionShard<'_>| setup.initial_parameters.read(decoder, partition_shard);
        let mut read_stored =
            |name: &str, rows, columns| setup.initial_parameters.read_stored_matrix(name, rows, columns);
        let device_and_shared = (device, shared_gathers);
        let shards = Shards::new(decoder, &*world, mesh.placement.clone(), device_and_shared, read, &mut read_stored)?;
        let optimizer = setup.initial_parameters.optimizer(config.optimizer, &shards)?;
        setup.initial_parameters.release();
        let offload = config.offload_activations.then(|| Offload::new(device)).transpose()?;
        let checkpoints = Checkpoints::new(&config.out, config.keep);
        let writers = writers(&*world, shards.kept().next().is_some())?;
        let meter = UtilizationMeter::new(setup, device, timed)?;
        let watchdog = Watchdog::new(config.spike_factor, config.spike_steps, setup.losses);
        let saving = None;
        Ok(Self {
            config,
            setup,
            recompute,
            world,
            groups,
            shards,
            writers,
            optimizer,
            offload,
            checkpoints,
            saving,
            meter,
            watchdog,
        })
    }

    pub(crate) fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Trains to the last step, or until rank 0 sees `stop`.
    pub(crate) fn train(mut self, stop: &AtomicBool, rank_zero: &Mutex<RankZero<'_>>) -> Result<RankOutcome> {
        let began = Instant::now();
        let (config, setup) = (self.config, self.setup);
        // Peak memory counts from here on: the measurement of the peak rate, in which all ranks took part, is over.
        self.on_rank_zero(rank_zero, |rank_zero| rank_zero.peak_gpu_memory.begin())?;
        let mut data_loader = setup.data_loader.clone();
        let (mut step, mut tokens) = (setup.spec.first_step, setup.tokens_seen);
        let (mut saved, mut evaluation, mut interrupted) = (None, None, false);
        while step < setup.spec.lr.steps {
            let agreed = self.agree(stop)?;
            if agreed.saved {
                self.finish_saving(rank_zero)?;
            }
            if agreed.stop {
                interrupted = true;
                break;
            }
            self.meter.start();
            let positions = data_loader.positions();
            let batches = data_loader.next_step(config.grad_accumulation);
            let (loss, grad_norm) = match self.step(step, &batches) {
                // Every rank returns the same error here, before anything was changed.
                Err(diverged @ Error::Diverged { .. }) => {
                    if saved != Some(step) && step > setup.spec.first_step {
                        self.start_saving(rank_zero, step, tokens, positions)?;
                    }
                    self.finish_saving(rank_zero)?;
                    return Err(diverged);
                }
                loss_and_gradients => loss_and_gradients?,
            };
            let now: u64 = batches.iter().map(Batch::real_tokens).sum();
            tokens += now;
            let Utilization { seconds, peak_share, waited, imbalance } = self.meter.stop(now)?;
            let mut metrics = StepMetrics {
                step: step + 1,
                loss,
                lr: setup.spec.lr.at(step),
                grad_norm,
                tokens,
                tokens_per_second: now as f64 / seconds,
                peak_share: Some(peak_share),
                waited,
                attention_imbalance: imbalance,
                peak_memory: ringspan::memory::peak(),
                peak_allocated: None,
                peak_gpu_memory: None,
                seconds: began.elapsed().as_secs_f64(),
            };
            step += 1;
            self.on_rank_zero(rank_zero, |rank_zero| {
                metrics.peak_allocated = rank_zero.peak_allocated.peak();
                metrics.peak_gpu_memory = rank_zero.peak_gpu_memory.peak()?;
                rank_zero.metrics.iter_mut().try_for_each(|file| file.append(&metrics))?;
                rank_zero.observer.stepped(&metrics);
                Ok(())
            })?;
            if let Err(spike) = self.watchdog.check(step, loss) {
                self.start_saving(rank_zero, step, tokens, data_loader.positions())?;
                self.finish_saving(rank_zero)?;
                return Err(spike);
            }
            let due = |every: Option<u64>| every.is_some_and(|n| step.is_multiple_of(n));
            if due(config.eval_every) || step == setup.spec.lr.steps {
                evaluation = self.evaluate(step, rank_zero)?;
            }
            if due(config.save_every) {
                self.start_saving(rank_zero, step, tokens, data_loader.positions())?;
                saved = Some(step);
            }
        }
        if saved != Some(step) && step > setup.spec.first_step {
            self.start_saving(rank_zero, step, tokens, data_loader.positions())?;
        }
        self.finish_saving(rank_zero)?;
        if !interrupted {
            self.export()?;
        }
        Ok(RankOutcome { step, interrupted, evaluation })
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

    fn on_rank_zero(
        &self,
        rank_zero: &Mutex<RankZero<'_>>,
        f: impl FnOnce(&mut RankZero<'_>) -> Result<()>,
    ) -> Result<()> {
        if self.world.rank() != 0 {
            return Ok(());
        }
        f(&mut rank_zero.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The decisions that all ranks agree on before a step.
struct Agreement {
    stop: bool,
    /// Whether all files of the checkpoint that is being written are on the disk.
    saved: bool,
}

/// The ranks whose `own` is true, rising: those that write checkpoint files.
fn writers(world: &dyn Communicator, own: bool) -> Result<Vec<usize>> {
    let all = world.all_gather(Buffer::U64(vec![own.into()]))?;
    let holds = |(rank, flag): (usize, &Arc<Buffer>)| (**flag == Buffer::U64(vec![1])).then_some(rank);
    Ok(all.iter().enumerate().filter_map(holds).collect())
}
