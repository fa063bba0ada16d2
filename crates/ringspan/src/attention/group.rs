//! The ranks that share a sequence, and this rank's means to compute.

use super::Wire;
use crate::comm::Communicator;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};
use crate::mesh::Grid;
use std::sync::Arc;

/// A context-parallel group as one of its ranks sees it.
pub struct Group {
    cp: Arc<dyn Communicator>,
    grid: Grid,
    ring: Arc<dyn Communicator>,
    ulysses: Arc<dyn Communicator>,
    kernel: Kernel,
    wire: Option<Wire>,
}

impl Group {
    /// Splits the communicator into the axes of `grid`. All of its ranks must call this. From now on `kernel` drives the
    /// communication of the group while it computes.
    ///
    /// # Errors
    /// Sizes whose product is not the communicator's; failures of other ranks.
    pub fn new(cp: Arc<dyn Communicator>, grid: impl Into<Grid>, kernel: Kernel) -> Result<Self> {
        let grid = grid.into();
        if grid.size() != Some(cp.size()) {
            return Err(Error::MeshSize {
                mesh: grid.to_string(),
                needed: grid.size().unwrap_or(usize::MAX),
                ranks: cp.size(),
            });
        }
        let (ring_rank, ulysses_rank) = grid.place(cp.rank());
        let ring = cp.split(ulysses_rank, ring_rank)?;
        let ulysses = cp.split(ring_rank, ulysses_rank)?;
        let (movers, user) = ([ring.clone(), ulysses.clone()], kernel.progress_hook());
        let progress = move || {
            movers.iter().for_each(|comm| comm.progress());
            user.iter().for_each(|user| user());
        };
        Ok(Self { cp, grid, ring, ulysses, kernel: kernel.with_progress(Arc::new(progress)), wire: None })
    }

    /// Sends queries, keys and values as `wire`, whatever they are stored as. Otherwise they travel as they are stored if
    /// all three have the same type, and as f32 if not.
    ///
    /// All ranks need the same wire, and without one tensors of the same types, ranks without tokens too: a message in
    /// another type than the receiver's is an error there, or is waited for in vain. On a CPU a number that the wire has no room
    /// for is an error on all ranks when it is sent; a GPU sends infinity.
    pub fn with_wire(self, wire: Wire) -> Self {
        Self { wire: Some(wire), ..self }
    }

    /// This rank in the group.
    pub fn rank(&self) -> usize {
        self.cp.rank()
    }

    /// Ranks in the group: R x U.
    pub fn size(&self) -> usize {
        self.cp.size()
    }

    /// The axes.
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// All ranks of the group.
    pub fn cp(&self) -> &Arc<dyn Communicator> {
        &self.cp
    }

    /// The ranks between which blocks move.
    pub fn ring(&self) -> &dyn Communicator {
        &*self.ring
    }

    /// The ranks that exchange tokens for heads.
    pub fn ulysses(&self) -> &dyn Communicator {
        &*self.ulysses
    }

    /// This rank's kernel.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// The type in which queries, keys and values of a call travel.
    pub fn wire(&self, q: &View, k: &View, v: &View) -> Wire {
        self.wire.unwrap_or(Wire::of([q, k, v]))
    }
}
