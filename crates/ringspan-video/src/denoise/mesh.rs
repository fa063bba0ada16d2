//! The mesh of ranks that denoise a video.

use crate::error::{Error, Result};
use ringspan::attention::Group;
use ringspan::comm::process_group::ProcessGroup;
use ringspan::comm::{Buffer, Communicator, threads};
use ringspan::{World, world};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A mesh of `branches x ring x ulysses` ranks: the ranks of a branch share the tokens of a video, and with two branches one
/// computes with the prompt and the other with the negative prompt.
///
/// ```
/// use ringspan_video::denoise::VideoMesh;
///
/// let mesh = VideoMesh { ring: 2, ulysses: 2, cfg_parallel: true, ..VideoMesh::single() };
/// assert_eq!((mesh.branch_size(), mesh.size()), (4, 8));
/// ```
#[derive(Debug, Clone)]
pub struct VideoMesh {
    /// Ring size R.
    pub ring: usize,
    /// Ulysses size U.
    pub ulysses: usize,
    /// Whether the two branches of guidance are computed by ranks of their own, twice as many.
    pub cfg_parallel: bool,
    /// Threads of each rank.
    pub threads: usize,
    /// Upper limit on the time that a rank waits for another.
    pub deadline: Duration,
    /// Whether ranks are threads of this process, or processes.
    pub processes: ProcessGroup,
}

impl VideoMesh {
    /// A mesh of one rank with one thread.
    #[must_use]
    pub const fn single() -> Self {
        let deadline = Duration::from_secs(3600);
        Self { ring: 1, ulysses: 1, cfg_parallel: false, threads: 1, deadline, processes: ProcessGroup::single() }
    }

    /// Number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.branch_size().saturating_mul(if self.cfg_parallel { 2 } else { 1 })
    }

    /// Number of ranks that share the tokens of a video.
    #[must_use]
    pub fn branch_size(&self) -> usize {
        self.ring.saturating_mul(self.ulysses)
    }

    /// Runs `work` on every rank, and returns the results of the ranks of this process, in rank order.
    ///
    /// # Errors
    /// An axis of size 0, a number of processes that is not the number of ranks; the error of the rank that failed first.
    pub fn run<T: Send>(&self, work: impl Fn(&RankGroups) -> Result<T> + Sync) -> Result<Vec<T>> {
        if self.size() == 0 {
            return Err(Error::Mesh(format!("{self}: each size must be at least 1")));
        }
        let ranks = threads::Options { deadline: self.deadline, ..Default::default() };
        let options = world::Options { threads_per_rank: self.threads, ranks };
        World::start(&self.processes, self.size(), options)?.run(|own| {
            let (world, rank, size) = (own.communicator(), own.index(), self.branch_size());
            let alone = Group::new(world.split(rank, 0)?, (1, 1), own.kernel())?;
            let (of_branch, across) = match self.cfg_parallel {
                false => (world.clone(), None),
                true => (world.split(rank / size, rank)?, Some(world.split(rank % size, rank)?)),
            };
            let video = Arc::new(Group::new(of_branch, (self.ring, self.ulysses), own.kernel())?);
            work(&RankGroups { rank, world: world.clone(), video, alone: Arc::new(alone), across })
        })
    }
}

impl fmt::Display for VideoMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ring, ulysses, cfg_parallel, threads, .. } = self;
        let branches = if *cfg_parallel { "2 branches of guidance x " } else { "" };
        write!(f, "{branches}ring {ring} x ulysses {ulysses}, {threads} threads each")
    }
}

/// The groups of a rank.
pub struct RankGroups {
    rank: usize,
    world: Arc<dyn Communicator>,
    video: Arc<Group>,
    alone: Arc<Group>,
    /// The ranks with the same tokens in both branches of guidance.
    across: Option<Arc<dyn Communicator>>,
}

impl RankGroups {
    /// This rank's number among all.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Bytes that this rank has sent to others so far.
    pub fn sent(&self) -> u64 {
        self.world.bytes_sent()
    }

    /// The ranks that share the tokens of a video with this one.
    pub fn video(&self) -> &Arc<Group> {
        &self.video
    }

    /// This rank alone.
    pub fn alone(&self) -> &Arc<Group> {
        &self.alone
    }

    /// The only branch of guidance that this rank computes, 0 for the prompt and 1 for the negative prompt; `None` if it computes
    /// both.
    pub fn branch(&self) -> Option<usize> {
        self.across.as_ref().map(|across| across.rank())
    }

    /// What rank 0 has decided, on all ranks, which must all call this.
    pub(super) fn decided(&self, own: bool) -> Result<bool> {
        let of_lead = (self.rank == 0).then(|| Buffer::F32(vec![f32::from(own)]));
        Ok(self.world.broadcast(0, of_lead)?.f32()? == [1.0])
    }

    /// The velocities of both branches, of which this rank has computed one.
    pub(super) fn exchanged(&self, own: Vec<f32>) -> Result<[Arc<Buffer>; 2]> {
        let Some(across) = &self.across else {
            return Err(Error::Mesh("there are no branches to exchange velocities between".into()));
        };
        let all = across.all_gather(Buffer::F32(own))?;
        <[Arc<Buffer>; 2]>::try_from(all).map_err(|all| Error::Mesh(format!("{} branches of guidance", all.len())))
    }
}
