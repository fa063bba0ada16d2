//! The ranks that share a sequence, and this rank's means to compute.

use super::Wire;
use crate::comm::Communicator;
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use std::sync::Arc;

/// A context-parallel group as one of its ranks sees it: ring outer, Ulysses inner.
pub struct Group {
    cp: Arc<dyn Communicator>,
    ring: Arc<dyn Communicator>,
    ulysses: Arc<dyn Communicator>,
    kernel: Kernel,
    wire: Wire,
}

impl Group {
    /// Splits the communicator of `ring x ulysses` ranks. All of them must call this.
    ///
    /// # Errors
    /// Sizes whose product is not the communicator's; failures of other ranks.
    pub fn new(cp: Arc<dyn Communicator>, ring: usize, ulysses: usize, kernel: Kernel) -> Result<Self> {
        if ring.checked_mul(ulysses) != Some(cp.size()) {
            return Err(Error::MeshSize {
                mesh: format!("ring {ring} x ulysses {ulysses}"),
                needed: ring.saturating_mul(ulysses),
                ranks: cp.size(),
            });
        }
        let (outer, inner) = (cp.rank() / ulysses, cp.rank() % ulysses);
        let ring = cp.split(inner, outer)?;
        let ulysses = cp.split(outer, inner)?;
        Ok(Self { cp, ring, ulysses, kernel, wire: Wire::F32 })
    }

    /// Sends queries, keys and values as `wire`.
    pub fn with_wire(self, wire: Wire) -> Self {
        Self { wire, ..self }
    }

    /// This rank in the group.
    pub fn rank(&self) -> usize {
        self.cp.rank()
    }

    /// Ranks in the group: R x U.
    pub fn size(&self) -> usize {
        self.cp.size()
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

    /// The type in which queries, keys and values travel.
    pub fn wire(&self) -> Wire {
        self.wire
    }
}
