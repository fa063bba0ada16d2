//! The ranks that a rank works with, by purpose.

use crate::{config::TrainConfig, error::Result, mesh::RunMesh};
use ringspan::{Group, comm::Communicator};
use ringspan_candle::{ExpertParallel, Experts, RankDevice, TensorParallel, experts::Local};
use std::sync::Arc;

/// A rank's groups. All of them are split from the world, each used for one thing only.
pub(super) struct Groups {
    /// The ranks that share this rank's sequences.
    pub(super) cp: Arc<Group>,
    /// The ranks that share the width of layers.
    pub(super) tensor: TensorParallel,
    /// Who computes the experts.
    pub(super) experts: Arc<dyn Experts + Send + Sync>,
    /// The ranks whose losses are of other tokens.
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
            let (color, key) = mesh.topology.place(world.rank(), name)?;
            Ok(world.split(color, key)?)
        };
        let cp = Group::new(split("cp")?, (config.ring, config.ulysses), device.kernel(config.threads)?)?;
        let place = mesh.parallel_rank(world.rank());
        let experts: Arc<dyn Experts + Send + Sync> = match place.ep.1 * place.moe_tp.1 {
            1 => Arc::new(Local),
            _ => Arc::new(ExpertParallel::new(experts, split("moe_ep")?, split("moe_tp")?)?),
        };
        let (tensor, losses) = (TensorParallel::new(split("tp")?), split("dp_cp")?);
        Ok(Self { cp: Arc::new(cp), tensor, experts, losses })
    }
}
