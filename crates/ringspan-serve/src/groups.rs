//! The groups of ranks that a rank works with.

use crate::error::Result;
use crate::model_parallel_rank::ModelParallelRank;
use ringspan::attention::Group;
use ringspan::comm::{Buffer, Communicator};
use ringspan::kernel::Kernel;
use ringspan_candle::experts::Local;
use ringspan_candle::{ExpertParallel, Experts, TensorParallel};
use std::sync::Arc;

/// A rank's groups by purpose. Each is used for nothing else.
#[derive(Clone)]
pub struct Groups {
    world: Arc<dyn Communicator>,
    /// The ranks of this rank's pipeline stage, and those at its position in every stage; `None` if there is one stage.
    pipeline: Option<[Arc<dyn Communicator>; 2]>,
    cp: Arc<Group>,
    /// This rank's attention replica, and the ranks at its position in each; `None` if there is one replica.
    replicas: Option<(usize, Arc<dyn Communicator>)>,
    tensor: TensorParallel,
    /// The ranks over which whole experts are distributed, and those that share the width of an expert; `None` if each rank has all
    /// experts.
    experts: Option<[Arc<dyn Communicator>; 2]>,
    model_rank: ModelParallelRank,
}

impl Groups {
    /// Splits the communicator of all ranks into groups: each of `attn_dp` attention replicas has a `grid` of ring x Ulysses, and
    /// `model_rank` says with which part of the model this rank computes. All ranks must call this.
    pub(crate) fn new(
        world: Arc<dyn Communicator>,
        attn_dp: usize,
        grid: (usize, usize),
        model_rank: ModelParallelRank,
        kernel: Kernel,
    ) -> Result<Self> {
        let (rank, stage) = (world.rank(), world.size() / model_rank.stage.1.max(1));
        let (tp, ep, moe_tp) = (model_rank.shard.tp.1, model_rank.shard.ep.1, model_rank.shard.moe_tp.1);
        let pipeline = match model_rank.stage.1 {
            1 => None,
            _ => Some([world.split(rank / stage, rank)?, world.split(rank % stage, rank)?]),
        };
        let whole = tp == 1;
        let of_replica = grid.0 * grid.1 * tp;
        let cp = match whole && pipeline.is_none() && attn_dp == 1 {
            true => world.clone(),
            false => world.split(rank / of_replica * tp + rank % tp, rank)?,
        };
        let replicas = match attn_dp {
            1 => None,
            _ => {
                let position = rank / stage * of_replica + rank % of_replica;
                Some((rank % stage / of_replica, world.split(position, rank)?))
            }
        };
        let tensor = if whole { TensorParallel::default() } else { TensorParallel::new(world.split(rank / tp, rank)?) };
        let experts = match ep * moe_tp {
            1 => None,
            // Among the ranks that share the experts, moe_tp varies fastest, then ep.
            each => Some([world.split(rank / each * moe_tp + rank % moe_tp, rank)?, world.split(rank / moe_tp, rank)?]),
        };
        let cp = Arc::new(Group::new(cp, grid, kernel)?);
        Ok(Self { world, pipeline, cp, replicas, tensor, experts, model_rank })
    }

    /// All ranks.
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.world
    }

    /// This rank's number among all ranks.
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// Number of all ranks.
    pub fn size(&self) -> usize {
        self.world.size()
    }

    /// The context-parallel ranks, which share the tokens of sequences and the pages of the cache.
    pub fn cp(&self) -> &Arc<Group> {
        &self.cp
    }

    /// This rank's attention replica, and the ranks at its position in each; `None` if there is one replica.
    pub(crate) fn replicas(&self) -> Option<(usize, &dyn Communicator)> {
        self.replicas.as_ref().map(|(replica, ranks)| (*replica, &**ranks))
    }

    /// The tensor-parallel ranks, which share the width of layers.
    pub fn tensor(&self) -> &TensorParallel {
        &self.tensor
    }

    /// Whether experts are distributed over several ranks.
    pub(crate) fn shares_experts(&self) -> bool {
        self.experts.is_some()
    }

    /// The implementation of expert layers for a model with `experts` experts, or without any.
    ///
    /// # Errors
    /// Fewer experts than ranks that share them.
    pub(crate) fn experts(&self, experts: usize) -> Result<Box<dyn Experts>> {
        match &self.experts {
            Some([ep, width]) if experts > 0 => Ok(Box::new(ExpertParallel::new(experts, ep.clone(), width.clone())?)),
            _ => Ok(Box::new(Local)),
        }
    }

    /// Broadcasts a message of rank 0 to all ranks: rank 0 sends it once to the first rank of each other stage, and each first rank
    /// broadcasts it within its stage.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub(crate) fn broadcast(&self, data: Option<Buffer>) -> Result<Arc<Buffer>> {
        let Some([stage, across]) = &self.pipeline else { return Ok(self.world.broadcast(0, data)?) };
        let crossed = match stage.rank() {
            0 => Some(Arc::unwrap_or_clone(across.broadcast(0, data)?)),
            _ => None,
        };
        Ok(stage.broadcast(0, crossed)?)
    }

    /// The ranks that have parts of the pages of a context-parallel rank, which is counted over attention replicas: stage by stage, the
    /// tensor-parallel ranks.
    pub(crate) fn sharing_pages(&self, cp_rank: usize) -> impl Iterator<Item = usize> + use<> {
        let (stages, tp) = (self.model_rank.stage.1.max(1), self.model_rank.shard.tp.1.max(1));
        let stage_size = self.world.size() / stages;
        (0..stages).flat_map(move |stage| {
            let first = stage * stage_size + cp_rank * tp;
            first..first + tp
        })
    }

    /// Whether this is the first rank of its pipeline stage.
    pub(crate) fn leads_stage(&self) -> bool {
        self.pipeline.as_ref().map_or(self.rank(), |[stage, _]| stage.rank()) == 0
    }

    /// The ranks at this rank's position in every pipeline stage, in the order of stages; `None` if there is one stage.
    pub(crate) fn stages(&self) -> Option<&Arc<dyn Communicator>> {
        self.pipeline.as_ref().map(|[_, across]| across)
    }

    /// The part of the model with which this rank computes.
    pub(crate) fn model_rank(&self) -> ModelParallelRank {
        self.model_rank
    }
}

/// The groups of a rank in a mesh that uses only context parallelism.
impl From<Arc<Group>> for Groups {
    fn from(cp: Arc<Group>) -> Self {
        let world = cp.cp().clone();
        Self {
            world,
            pipeline: None,
            cp,
            replicas: None,
            tensor: TensorParallel::default(),
            experts: None,
            model_rank: ModelParallelRank::default(),
        }
    }
}
