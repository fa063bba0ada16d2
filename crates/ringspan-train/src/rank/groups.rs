//! The groups of ranks that a rank works with, by purpose.

use crate::{config::TrainConfig, error::Result, mesh::RunMesh};
use ringspan::{Group, comm::Communicator};
use ringspan_candle::{ExpertParallel, Experts, RankDevice, TensorParallel, experts::Local};
use std::sync::Arc;

/// A rank's groups. All of them are split from the world, and each is used for one purpose only.
pub(super) struct Groups {
    /// The context-parallel ranks, which share this rank's sequences.
    pub(super) cp: Arc<Group>,
    /// The tensor-parallel ranks, which share the width of layers.
    pub(super) tensor: TensorParallel,
    /// Computes experts: on this rank alone, or expert-parallel.
    pub(super) experts: Arc<dyn Experts + Send + Sync>,
    /// The data- and context-parallel ranks, whose losses are of other tokens.
    pub(super) losses: Arc<dyn Communicator>,
}

impl Groups {
    pub(super) fn new(
        config: &TrainConfig,
        mesh: &RunMesh,
        experts: usize,
        device: &RankDevice,
        world: &Arc<dyn Communicator>,
    ) -> Result<Self> {
        let split = |name: &str| -> Result<Arc<dyn Communicator>> {
            let (color, key) = mesh.topology.color_and_key(world.rank(), name)?;
            Ok(world.split(color, key)?)
        };
        let cp = Group::new(split("cp")?, (config.ring, config.ulysses), device.kernel(config.threads)?)?;
        let parallel_rank = mesh.parallel_rank(world.rank());
        let experts: Arc<dyn Experts + Send + Sync> = match parallel_rank.ep.1 * parallel_rank.moe_tp.1 {
            1 => Arc::new(Local),
            _ => Arc::new(ExpertParallel::new(experts, split("moe_ep")?, split("moe_tp")?)?),
        };
        let (tensor, losses) = (TensorParallel::new(split("tp")?), split("dp_cp")?);
        Ok(Self { cp: Arc::new(cp), tensor, experts, losses })
    }
}
