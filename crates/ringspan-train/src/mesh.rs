//! The mesh of a run: its axes, and which shard of the model each rank holds.

use crate::{
    config::{Sharding, TrainConfig},
    error::{Error, Result, model_error},
    shards::ShardPlacement,
};
use ringspan::comm::{process_group::ProcessGroup, threads};
use ringspan::mesh::{Experts, Grid, Topology, Training};
use ringspan::{World, world};
use ringspan_candle::{DeviceName, ParallelRank};
use ringspan_models::Decoder;

/// The mesh of a run, and how the model is sharded over it.
pub(crate) struct RunMesh {
    pub(crate) topology: Topology,
    /// How the ranks of one copy of the model, which are neighbours, share its parameters.
    pub(crate) placement: ShardPlacement,
    /// Whether all ranks are threads of this process and compute on the CPU, so that they can read the same tensors.
    pub(crate) shares_memory: bool,
    ranks: Vec<ParallelRank>,
}

impl RunMesh {
    /// The mesh that a configuration asks for, checked against the sizes of the model.
    pub(crate) fn new(config: &TrainConfig, decoder: &Decoder) -> Result<Self> {
        let sparse = decoder.experts() > 0;
        for (flag, size) in [("ep", config.ep), ("moe-dp", config.moe_dp)] {
            if let (Some(size), false) = (size, sparse) {
                let model = &decoder.config().model_type;
                return Err(Error::Settings(format!(
                    "--{flag} {size} shares experts, and {model} has none; leave it out"
                )));
            }
        }
        let training = training_axes(config, sparse)?;
        let topology = training.topology()?;
        let replica_ranks = config.dp_shard * config.ring * config.ulysses * config.tp;
        let (ep, moe_tp) = match training.experts {
            Some(Experts { ep, moe_dp }) => (ep, topology.world() / (ep * moe_dp)),
            None => (1, 1),
        };
        if !replica_ranks.is_multiple_of(ep * moe_tp) {
            return Err(Error::Settings(format!(
                "ep {ep} x moe_tp {moe_tp} ranks share the experts, which does not divide the {replica_ranks} ranks of a copy of the \
                 model (dp_shard {} x ring {} x ulysses {} x tp {}): choose --ep and --moe-dp so that it does",
                config.dp_shard, config.ring, config.ulysses, config.tp
            )));
        }
        decoder.all_parameters().check(config.tp, ep, moe_tp).map_err(model_error)?;
        let parallel_rank_of = |rank| {
            let coordinates = topology.coordinates(rank);
            let coordinate = |name| coordinates.iter().find(|(axis, _)| *axis == name).map_or(0, |(_, at)| *at);
            ParallelRank {
                tp: (coordinate("tp"), config.tp),
                ep: (coordinate("moe_ep"), ep),
                moe_tp: (coordinate("moe_tp"), moe_tp),
            }
        };
        let ranks: Vec<ParallelRank> = (0..replica_ranks).map(parallel_rank_of).collect();
        for rank in &ranks {
            let heads = decoder.head_counts().of_rank(rank.tp).map_err(model_error)?.queries.len();
            let (ulysses, tp) = (config.ulysses, config.tp);
            if ulysses > heads && tp > 1 {
                return Err(Error::Settings(format!(
                    "--ulysses {ulysses} distributes heads over {ulysses} ranks, but --tp {tp} leaves {heads} of the {} query heads \
                     to some: choose ulysses x tp of at most {}",
                    decoder.config().num_attention_heads,
                    decoder.config().num_attention_heads
                )));
            }
            if ulysses > heads {
                return Err(ringspan::Error::UlyssesHeads { ulysses, heads, ranks: config.ring * ulysses }.into());
            }
        }
        let placement = ShardPlacement::new(decoder, ranks.clone(), config.sharding == Sharding::Full)?;
        let shares_memory = config.local_ranks.is_none() && config.device == DeviceName::Cpu;
        Ok(Self { topology, placement, shares_memory, ranks })
    }

    /// This rank's index in each group that shares layers (tensor parallel, expert parallel).
    pub(crate) fn parallel_rank(&self, rank: usize) -> ParallelRank {
        self.ranks[rank % self.ranks.len()]
    }

    /// Like [`parallel_rank`](Self::parallel_rank), for all ranks of a copy of the model, in rank order.
    pub(crate) fn parallel_ranks(&self) -> &[ParallelRank] {
        &self.ranks
    }
}

/// Starts the ranks of a training's mesh.
pub(crate) fn start_world(processes: &ProcessGroup, config: &TrainConfig) -> Result<World> {
    let ranks = threads::Options { deadline: config.deadline, ..threads::Options::default() };
    let options = world::Options { threads_per_rank: config.threads, ranks };
    Ok(World::start(processes, config.ranks(), options)?)
}

/// The axes of a run. Without `--ep` and `--moe-dp`, the experts' width is cut over tp like that of other layers.
fn training_axes(config: &TrainConfig, sparse: bool) -> Result<Training> {
    let TrainConfig { dp_replicate, dp_shard, ring, ulysses, tp, ep, moe_dp, .. } = *config;
    let ranks = config.ranks();
    let experts = match (ep, moe_dp) {
        (None, None) if sparse && tp > 1 => Some(Experts { ep: 1, moe_dp: ranks / tp }),
        (None, None) => None,
        (ep, Some(moe_dp)) => Some(Experts { ep: ep.unwrap_or(1), moe_dp }),
        (Some(ep), None) if ranks.is_multiple_of(ep.saturating_mul(tp).max(1)) => {
            Some(Experts { ep, moe_dp: ranks / (ep * tp).max(1) })
        }
        (Some(ep), None) => {
            return Err(Error::Settings(format!(
                "--ep {ep} x --tp {tp} does not divide the {ranks} ranks of the mesh; with --moe-dp M, moe_tp is what is left"
            )));
        }
    };
    Ok(Training { pp: 1, dp_replicate, dp_shard, cp: Grid::new(ring, ulysses), tp, experts })
}
