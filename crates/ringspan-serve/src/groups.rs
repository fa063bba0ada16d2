//! The groups of ranks that a rank works with.

use crate::error::Result;
use ringspan::attention::Group;
use ringspan::comm::Communicator;
use ringspan::kernel::Kernel;
use ringspan_candle::experts::Local;
use ringspan_candle::{ExpertParallel, Experts, ParallelRank, TensorParallel};
use std::sync::Arc;

/// A rank's groups by purpose. Each is used for nothing else.
#[derive(Clone)]
pub struct Groups {
    world: Arc<dyn Communicator>,
    cp: Arc<Group>,
    tensor: TensorParallel,
    /// The ranks over which whole experts are distributed, and those that share the width of an expert; `None` if each rank has all
    /// experts.
    experts: Option<[Arc<dyn Communicator>; 2]>,
    place: ParallelRank,
}

impl Groups {
    /// Splits the communicator of all ranks into groups: `grid` is ring x Ulysses, and `place` this rank's position in the groups that
    /// share layers. All ranks must call this.
    pub(crate) fn new(
        world: Arc<dyn Communicator>,
        grid: (usize, usize),
        place: ParallelRank,
        kernel: Kernel,
    ) -> Result<Self> {
        let rank = world.rank();
        let (tp, ep, moe_tp) = (place.tp.1, place.ep.1, place.moe_tp.1);
        let whole = tp == 1;
        let cp = if whole { world.clone() } else { world.split(rank % tp, rank)? };
        let tensor = if whole { TensorParallel::default() } else { TensorParallel::new(world.split(rank / tp, rank)?) };
        let experts = match ep * moe_tp {
            1 => None,
            // Among the ranks that share the experts, moe_tp varies fastest, then ep.
            each => Some([world.split(rank / each * moe_tp + rank % moe_tp, rank)?, world.split(rank / moe_tp, rank)?]),
        };
        let cp = Arc::new(Group::new(cp, grid, kernel)?);
        Ok(Self { world, cp, tensor, experts, place })
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

    /// The tensor-parallel ranks, which share the width of layers.
    pub fn tensor(&self) -> &TensorParallel {
        &self.tensor
    }

    /// What computes the layers of a model with `experts` experts, or without any.
    ///
    /// # Errors
    /// Fewer experts than ranks that share them.
    pub(crate) fn experts(&self, experts: usize) -> Result<Box<dyn Experts>> {
        match &self.experts {
            Some([ep, width]) if experts > 0 => Ok(Box::new(ExpertParallel::new(experts, ep.clone(), width.clone())?)),
            _ => Ok(Box::new(Local)),
        }
    }

    /// This rank's position in each group that shares layers.
    pub(crate) fn place(&self) -> ParallelRank {
        self.place
    }
}

/// The groups of a rank that shares tokens alone with others.
impl From<Arc<Group>> for Groups {
    fn from(cp: Arc<Group>) -> Self {
        let world = cp.cp().clone();
        Self { world, cp, tensor: TensorParallel::default(), experts: None, place: ParallelRank::default() }
    }
}
