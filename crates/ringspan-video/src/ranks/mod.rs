//! The ranks that make a video: their mesh, and the threads or processes that compute one stage after another.

mod groups;
mod mesh;

pub use groups::RankGroups;
pub use mesh::VideoMesh;

use crate::error::Result;
use ringspan::comm::process_group::ProcessGroup;
use ringspan::comm::{Buffer, Communicator, threads};
use ringspan::{Rank, World, world};
use std::sync::Arc;

/// The ranks of a mesh, which live as long as this value.
///
/// Ring and Ulysses matter for the transformer. Encoders and the autoencoder use the number of ranks alone: a ring of all ranks shares the
/// tokens of an encoder, and all ranks share the columns of the autoencoder.
///
/// After a failure, ranks that are threads can be used again. Ranks that are processes cannot: all later calls are refused.
///
/// ```
/// use ringspan_video::ranks::{VideoMesh, VideoRanks};
///
/// let mut ranks = VideoRanks::start(&VideoMesh { ring: 2, ..VideoMesh::single() })?;
/// let numbers = ranks.run(|groups| Ok((groups.rank(), groups.video().cp().size())))?;
/// assert_eq!(numbers, [(0, 2), (1, 2)]);
/// # Ok::<_, ringspan_video::Error>(())
/// ```
#[derive(Debug)]
pub struct VideoRanks {
    mesh: VideoMesh,
    world: World,
    /// Makes the communicator through which a rank computes a video of the one that it has.
    wrap: WrapCommunicator,
}

/// Makes a communicator that wraps another one.
pub type WrapCommunicator = fn(Arc<dyn Communicator>) -> Arc<dyn Communicator>;

impl VideoRanks {
    /// Starts the ranks of a mesh.
    ///
    /// # Errors
    /// What [`VideoMesh::check`] refuses, a number of processes that is not the number of ranks, more threads than the system allows.
    pub fn start(mesh: &VideoMesh) -> Result<Self> {
        mesh.check()?;
        Self::start_with(mesh, |comm| comm)
    }

    /// Like [`start`](Self::start), and each rank computes a video through what `wrap` makes of its communicator, which has the same ranks:
    /// so messages can be measured, or be treated as another transport would. Ranks that are threads may shard weights, as processes do.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_with(mesh: &VideoMesh, wrap: WrapCommunicator) -> Result<Self> {
        mesh.check_sizes()?;
        let ranks = threads::Options { deadline: mesh.deadline, ..Default::default() };
        let options = world::Options { threads_per_rank: mesh.threads, ranks };
        Ok(Self { mesh: mesh.clone(), world: World::start(&mesh.processes, mesh.size(), options)?, wrap })
    }

    /// The mesh.
    #[must_use]
    pub fn mesh(&self) -> &VideoMesh {
        &self.mesh
    }

    /// Number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.mesh.size()
    }

    /// Whether ranks are threads of this process, or processes.
    pub(crate) fn processes(&self) -> &ProcessGroup {
        &self.mesh.processes
    }

    /// Runs `work` on every rank, with its groups, and returns the results of the ranks of this process, in rank order.
    ///
    /// # Errors
    /// The error of the rank that failed first, or of ranks that are processes, one of which failed in an earlier call.
    pub fn run<T: Send>(&mut self, work: impl Fn(&RankGroups) -> Result<T> + Sync) -> Result<Vec<T>> {
        let Self { mesh, world, wrap } = self;
        world.run(|rank| work(&RankGroups::new(rank, mesh, *wrap)?))
    }

    /// Runs `work` on every rank, and gathers its numbers in the process of rank 0, in rank order; `None` in other processes.
    ///
    /// # Errors
    /// The error of the rank that failed first.
    pub(crate) fn gather(
        &mut self,
        work: impl Fn(&Rank) -> Result<Vec<f32>> + Sync,
    ) -> Result<Option<Vec<Arc<Buffer>>>> {
        let own = self.world.run(work)?;
        Ok(self.processes().gather(own.into_iter().map(Buffer::F32).collect())?)
    }

    /// Broadcasts the numbers of rank 0's process to every process.
    ///
    /// # Errors
    /// Failures of other processes.
    pub(crate) fn broadcast(&self, own: Option<Vec<f32>>) -> Result<Vec<f32>> {
        let Some(comm) = self.processes().comm() else { return Ok(own.unwrap_or_default()) };
        Ok(comm.broadcast(0, own.map(Buffer::F32))?.f32()?.to_vec())
    }
}
