//! The groups of a rank.

use super::{VideoMesh, WrapCommunicator};
use crate::error::{Error, Result};
use ringspan::Rank;
use ringspan::attention::Group;
use ringspan::comm::{Buffer, Communicator};
use std::sync::Arc;

/// The groups of a rank: those that share a video's tokens with it, and the other branch of guidance.
pub struct RankGroups {
    rank: usize,
    world: Arc<dyn Communicator>,
    video: Arc<Group>,
    alone: Arc<Group>,
    /// The ranks with the same tokens in both branches of guidance.
    across: Option<Arc<dyn Communicator>>,
    head_chunks: usize,
    /// The group of all ranks for the messages of weights, if they are sharded.
    sharing_weights: Option<Arc<dyn Communicator>>,
    /// Bytes that this rank had sent to others before these groups were made.
    sent_before: u64,
}

impl RankGroups {
    /// Makes the groups of a rank; all ranks of the mesh must call this.
    pub(super) fn new(own: &Rank, mesh: &VideoMesh, wrap: WrapCommunicator) -> Result<Self> {
        let (world, rank, size) = (wrap(own.communicator().clone()), own.index(), mesh.branch_size());
        let sent_before = world.bytes_sent();
        let alone = Group::new(world.split(rank, 0)?, (1, 1), own.kernel())?;
        let (of_branch, across) = match mesh.cfg_parallel {
            false => (world.clone(), None),
            true => (world.split(rank / size, rank)?, Some(world.split(rank % size, rank)?)),
        };
        let video = Arc::new(Group::new(of_branch, (mesh.ring, mesh.ulysses), own.kernel())?);
        let sharing_weights = if mesh.shard_weights { Some(world.split(0, rank)?) } else { None };
        let (alone, head_chunks) = (Arc::new(alone), mesh.head_chunks);
        Ok(Self { rank, world, video, alone, across, head_chunks, sharing_weights, sent_before })
    }

    /// This rank's number among all.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Bytes that this rank has sent to others in this call of [`VideoRanks::run`](super::VideoRanks::run).
    pub fn sent(&self) -> u64 {
        self.world.bytes_sent() - self.sent_before
    }

    /// The ranks that share the tokens of a video with this one.
    pub fn video(&self) -> &Arc<Group> {
        &self.video
    }

    /// This rank alone.
    pub fn alone(&self) -> &Arc<Group> {
        &self.alone
    }

    /// The number of parts in which Ulysses ranks exchange heads.
    pub fn head_chunks(&self) -> usize {
        self.head_chunks
    }

    /// The ranks that hold a share of the transformer's weights each; `None` if this rank holds all.
    pub(crate) fn sharing_weights(&self) -> Option<&Arc<dyn Communicator>> {
        self.sharing_weights.as_ref()
    }

    /// The only branch of guidance that this rank computes, 0 for the prompt and 1 for the negative prompt; `None` if it computes
    /// both.
    pub fn branch(&self) -> Option<usize> {
        self.across.as_ref().map(|across| across.rank())
    }

    /// What rank 0 has decided, on all ranks, which must all call this.
    pub(crate) fn decided(&self, own: bool) -> Result<bool> {
        let of_lead = (self.rank == 0).then(|| Buffer::F32(vec![f32::from(own)]));
        Ok(self.world.broadcast(0, of_lead)?.f32()? == [1.0])
    }

    /// The velocities of both branches, of which this rank has computed one.
    pub(crate) fn exchanged(&self, own: Vec<f32>) -> Result<[Arc<Buffer>; 2]> {
        let Some(across) = &self.across else {
            return Err(Error::Mesh("there are no branches to exchange velocities between".into()));
        };
        let all = across.all_gather(Buffer::F32(own))?;
        <[Arc<Buffer>; 2]>::try_from(all).map_err(|all| Error::Mesh(format!("{} branches of guidance", all.len())))
    }
}
