//! One rank of a training. Every rank takes the same steps over the same batches, and its own part of each.

mod export;
mod groups;
mod save_checkpoint;
mod step;
mod training_run;
mod utilization;

use crate::{
    checkpoint::Checkpoints,
    config::TrainConfig,
    error::Result,
    metrics::{EvaluationMetrics, MetricsFile},
    observer::Observer,
    optimizer::Optimizer,
    peak_memory::{PeakAllocated, PeakGpuMemory},
    setup::Setup,
    shards::{PartitionShard, Shards, SharedGathers},
    watchdog::Watchdog,
};
use groups::Groups;
use ringspan::comm::{Buffer, Communicator, timed::TimedCommunicator};
use ringspan_candle::{Devices, Offload, Recompute};
use save_checkpoint::PendingSave;
use std::sync::{Arc, Mutex, PoisonError};
pub(crate) use step::LossAndGradients;
use utilization::UtilizationMeter;

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
        let timed = Arc::new(TimedCommunicator::new(world));
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

/// The ranks whose `own` is true, rising: those that write checkpoint files.
fn writers(world: &dyn Communicator, own: bool) -> Result<Vec<usize>> {
    let all = world.all_gather(Buffer::U64(vec![own.into()]))?;
    let holds = |(rank, flag): (usize, &Arc<Buffer>)| (**flag == Buffer::U64(vec![1])).then_some(rank);
    Ok(all.iter().enumerate().filter_map(holds).collect())
}
