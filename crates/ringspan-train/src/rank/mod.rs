//! One rank's training loop. Every rank runs the same steps over the same batches and takes its own part of each.

mod export;
mod groups;
mod meter;
mod save;
mod step;

use crate::{
    checkpoint::Checkpoints,
    config::TrainConfig,
    data::Batch,
    error::{Error, Result},
    memory::{Allocated, InUse},
    metrics::{EvaluationMetrics, MetricsFile, StepMetrics},
    observer::Observer,
    optimizer::Optimizer,
    setup::Setup,
    shards::{Piece, Shards},
    watchdog::Watchdog,
};
use groups::Groups;
use meter::{Meter, Use};
use ringspan::comm::{Buffer, Communicator, timed::Timed};
use ringspan_candle::{Devices, Offload};
use save::Saving;
use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};
pub(crate) use step::Stepped;

/// The objects that only rank 0 uses: the observer, the metrics file, and the counts of memory.
pub(crate) struct Host<'a> {
    pub(crate) observer: &'a mut dyn Observer,
    /// None in a process without rank 0.
    pub(crate) metrics: Option<MetricsFile>,
    pub(crate) allocated: Allocated,
    pub(crate) in_use: InUse,
}

/// The state in which a rank's training loop ended.
pub(crate) struct End {
    pub(crate) step: u64,
    pub(crate) interrupted: bool,
    pub(crate) evaluation: Option<EvaluationMetrics>,
}

/// A rank, its shards of the parameters, and its optimiser.
pub(crate) struct Rank<'a> {
    config: &'a TrainConfig,
    setup: &'a Setup,
    world: Arc<dyn Communicator>,
    groups: Groups,
    shards: Shards,
    /// The ranks that write checkpoint files, rising.
    writers: Vec<usize>,
    optimizer: Optimizer,
    /// Moves stored activations to the CPU and back; none where they stay.
    offload: Option<Offload>,
    checkpoints: Checkpoints,
    /// The checkpoint that is being written.
    saving: Option<Saving>,
    meter: Meter,
    watchdog: Watchdog,
}

impl<'a> Rank<'a> {
    /// The rank of `world`, which computes on its device of `devices`.
    pub(crate) fn new(
        config: &'a TrainConfig,
        setup: &'a Setup,
        devices: &Devices,
        world: Arc<dyn Communicator>,
    ) -> Result<Self> {
        let (decoder, mesh, device) = (&setup.decoder, &setup.mesh, devices.of(world.rank()));
        let timed = Arc::new(Timed::new(world));
        let world: Arc<dyn Communicator> = timed.clone();
        let groups = Groups::new(config, mesh, decoder.experts(), device, &world)?;
        let read = |piece: &Piece<'_>| setup.start.read(decoder, piece);
        let mut read_stored = |name: &str, rows, columns| setup.start.read_stored(name, rows, columns);
        let shards = Shards::new(decoder, &*world, mesh.sharing.clone(), device, read, &mut read_stored)?;
        let optimizer = setup.start.optimizer(config.method, &shards)?;
        setup.start.done();
        let offload = config.offload_activations.then(|| Offload::new(device)).transpose()?;
        let checkpoints = Checkpoints::new(&config.out, config.keep);
        let writers = writers(&*world, shards.kept().next().is_some())?;
        let meter = Meter::new(setup, device, timed)?;
        let watchdog = Watchdog::new(config.spike_factor, config.spike_steps, setup.losses);
        let saving = None;
        Ok(Self {
            config,
            setup,
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
    pub(crate) fn train(mut self, stop: &AtomicBool, host: &Mutex<Host<'_>>) -> Result<End> {
        let began = Instant::now();
        let (config, setup) = (self.config, self.setup);
        // Peak memory counts from here on: the measurement of the peak rate, in which all ranks took part, is over.
        self.on_host(host, |host| host.in_use.begin())?;
        let mut feed = setup.feed.clone();
        let (mut step, mut tokens) = (setup.first_step, setup.tokens);
        let (mut saved, mut evaluation, mut interrupted) = (None, None, false);
        while step < setup.lr.steps {
            let agreed = self.agree(stop)?;
            if agreed.saved {
                self.finish_saving(host)?;
            }
            if agreed.stop {
                interrupted = true;
                break;
            }
            self.meter.start();
            let places = feed.dealt();
            let batches = feed.next_step(config.grad_accumulation);
            let (loss, grad_norm) = match self.step(step, &batches) {
                // Every rank returns the same error here, before anything was changed.
                Err(diverged @ Error::Diverged { .. }) => {
                    if saved != Some(step) && step > setup.first_step {
                        self.start_saving(host, step, tokens, places)?;
                    }
                    self.finish_saving(host)?;
                    return Err(diverged);
                }
                stepped => stepped?,
            };
            let now: u64 = batches.iter().map(Batch::real_tokens).sum();
            tokens += now;
            let Use { seconds, peak_share, waited, imbalance } = self.meter.stop(now)?;
            let mut metrics = StepMetrics {
                step: step + 1,
                loss,
                lr: setup.lr.at(step),
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
            self.on_host(host, |host| {
                metrics.peak_allocated = host.allocated.most();
                metrics.peak_gpu_memory = host.in_use.most()?;
                host.metrics.iter_mut().try_for_each(|file| file.append(&metrics))?;
                host.observer.stepped(&metrics);
                Ok(())
            })?;
            if let Err(spike) = self.watchdog.look(step, loss) {
                self.start_saving(host, step, tokens, feed.dealt())?;
                self.finish_saving(host)?;
                return Err(spike);
            }
            let due = |every: Option<u64>| every.is_some_and(|n| step.is_multiple_of(n));
            if due(config.eval_every) || step == setup.lr.steps {
                evaluation = self.look_at_held_out(step, host)?;
            }
            if due(config.save_every) {
                self.start_saving(host, step, tokens, feed.dealt())?;
                saved = Some(step);
            }
        }
        if saved != Some(step) && step > setup.first_step {
            self.start_saving(host, step, tokens, feed.dealt())?;
        }
        self.finish_saving(host)?;
        if !interrupted {
            self.export()?;
        }
        Ok(End { step, interrupted, evaluation })
    }

    /// Agrees with all ranks: rank 0's flag decides whether to stop, so that no rank is left alone in a step, and a checkpoint is
    /// saved once all ranks have written.
    fn agree(&self, stop: &AtomicBool) -> Result<Agreement> {
        let written = self.saving.as_ref().is_some_and(Saving::is_written);
        let views = [stop.load(Ordering::SeqCst), written].map(u64::from);
        let all = self.world.all_gather(Buffer::U64(views.to_vec()))?;
        let view = |buffer: &Arc<Buffer>| match &**buffer {
            Buffer::U64(views) => [0, 1].map(|at| views.get(at) == Some(&1)),
            _ => [false; 2],
        };
        let stop = all.first().is_some_and(|first| view(first)[0]);
        Ok(Agreement { stop, saved: all.iter().all(|buffer| view(buffer)[1]) })
    }

    fn on_host(&self, host: &Mutex<Host<'_>>, f: impl FnOnce(&mut Host<'_>) -> Result<()>) -> Result<()> {
        if self.world.rank() != 0 {
            return Ok(());
        }
        f(&mut host.lock().unwrap_or_else(PoisonError::into_inner))
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
