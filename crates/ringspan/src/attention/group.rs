//! The ranks of a context-parallel group, with this rank's communicators and kernel.

use super::Wire;
use crate::comm::Communicator;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};
use crate::mesh::Grid;
use std::sync::Arc;

/// A context-parallel group as one of its ranks sees it.
///
/// ```
/// use ringspan::{Error, Group, World};
///
/// // A ring of two, each of two Ulysses ranks.
/// let places = World::threads(4)?.run(|rank| {
///     let group = Group::new(rank.communicator().clone(), (2, 2), rank.kernel())?;
///     Ok::<_, Error>((group.ring().rank(), group.ulysses().rank()))
/// })?;
/// assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1)]);
/// # Ok::<_, Error>(())
/// ```
pub struct Group {
    cp: Arc<dyn Communicator>,
    grid: Grid,
    ring: Arc<dyn Communicator>,
    ulysses: Arc<dyn Communicator>,
    kernel: Kernel,
    wire: Option<Wire>,
}

impl Group {
    /// Splits the communicator into the axes of `grid`. All of its ranks must call this. From then on `kernel` drives the
    /// communication of the group while it computes.
    ///
    /// # Errors
    /// Axis sizes whose product is not the communicator's size, or failures of other ranks.
    pub fn new(cp: Arc<dyn Communicator>, grid: impl Into<Grid>, kernel: Kernel) -> Result<Self> {
        let grid = grid.into();
        if grid.size() != Some(cp.size()) {
            return Err(Error::MeshSize {
                mesh: grid.to_string(),
                needed: grid.size().unwrap_or(usize::MAX),
                ranks: cp.size(),
            });
        }
        let (ring_rank, ulysses_rank) = grid.coordinates(cp.rank());
        let ring = cp.split(ulysses_rank, ring_rank)?;
        let ulysses = cp.split(ring_rank, ulysses_rank)?;
        let (movers, user) = ([ring.clone(), ulysses.clone()], kernel.progress_hook());
        let progress = move || {
            movers.iter().for_each(|comm| comm.progress());
            user.iter().for_each(|user| user());
        };
        Ok(Self { cp, grid, ring, ulysses, kernel: kernel.with_progress(Arc::new(progress)), wire: None })
    }

    /// Sends queries, keys and values as `wire`, whatever their storage type. Without this setting they travel in their
    /// storage type if all three have the same, and as f32 if not.
    ///
    /// All ranks need the same wire type. Without one, the tensors of all ranks need the same types, even on ranks without
    /// tokens: a message of another type is an error at the receiver, or is never matched. On a CPU, a number out of the
    /// wire type's range is an error on all ranks when it is sent; a GPU sends infinity.
    pub fn with_wire(self, wire: Wire) -> Self {
        Self { wire: Some(wire), ..self }
    }

    /// This rank's number in the group.
    pub fn rank(&self) -> usize {
        self.cp.rank()
    }

    /// Number of ranks in the group: R x U.
    pub fn size(&self) -> usize {
        self.cp.size()
    }

    /// The sizes of the ring and Ulysses axes.
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// All ranks of the group.
    pub fn cp(&self) -> &Arc<dyn Communicator> {
        &self.cp
    }

    /// The communicator of the ring axis, over which blocks move.
    pub fn ring(&self) -> &dyn Communicator {
        &*self.ring
    }

    /// The communicator of the Ulysses axis, over which tokens are exchanged for heads.
    pub fn ulysses(&self) -> &dyn Communicator {
        &*self.ulysses
    }

    /// This rank's kernel.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Bytes of a number of queries, keys and values in a message, if the group was given a wire type.
    pub fn wire_bytes(&self) -> Option<usize> {
        self.wire.map(|wire| wire.width() as usize)
    }

    /// The wire type of a call with these queries, keys and values.
    pub fn wire(&self, q: &View, k: &View, v: &View) -> Wire {
        self.wire.unwrap_or(Wire::of([q, k, v]))
    }
}
