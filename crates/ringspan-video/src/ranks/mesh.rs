//! The mesh of ranks that make a video.

use crate::error::{Error, Result};
use ringspan::comm::process_group::ProcessGroup;
use std::fmt;
use std::time::Duration;

/// A mesh of `branches x ring x ulysses` ranks: the ranks of a branch share the tokens of a video, and with two branches one
/// computes with the prompt and the other with the negative prompt.
///
/// ```
/// use ringspan_video::ranks::VideoMesh;
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
    /// The number of parts in which Ulysses ranks exchange heads: one part travels while another is computed. At most as many as a
    /// rank has heads are made.
    pub head_chunks: usize,
    /// Whether the two branches of guidance are computed by ranks of their own, twice as many.
    pub cfg_parallel: bool,
    /// Whether each rank holds only a share of the transformer's weights, and gathers those of a block from the others when it computes.
    /// This is for ranks that are processes; those that are threads of one process share its weights in any case.
    pub shard_weights: bool,
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
        let processes = ProcessGroup::single();
        let shard_weights = false;
        Self {
            ring: 1,
            ulysses: 1,
            head_chunks: 1,
            cfg_parallel: false,
            shard_weights,
            threads: 1,
            deadline,
            processes,
        }
    }

    /// Refuses axes of size 0, weights that no ranks share, and parts of an exchange of heads that no ranks have with each other.
    ///
    /// # Errors
    /// The sizes.
    pub fn check(&self) -> Result<()> {
        self.check_sizes()?;
        if self.shard_weights && (self.size() == 1 || self.processes.local().is_none()) {
            return Err(Error::Mesh(format!(
                "{self}: sharding weights has no effect, because the ranks of a process share its weights, and there is one process"
            )));
        }
        Ok(())
    }

    /// Like [`check`](Self::check), but lets ranks of one process shard weights.
    pub(super) fn check_sizes(&self) -> Result<()> {
        if self.size() == 0 {
            return Err(Error::Mesh(format!("{self}: each size must be at least 1")));
        }
        match self.head_chunks {
            0 => Err(Error::Mesh("heads are exchanged in 0 parts: there must be at least 1".into())),
            1 => Ok(()),
            chunks if self.ulysses == 1 => Err(Error::Mesh(format!(
                "{self}: {chunks} parts of the exchange of heads have no effect, because one Ulysses rank exchanges none"
            ))),
            _ => Ok(()),
        }
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
}

impl fmt::Display for VideoMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ring, ulysses, head_chunks, cfg_parallel, threads, .. } = self;
        let parts = if *head_chunks > 1 { format!(" (heads in up to {head_chunks} parts)") } else { String::new() };
        let branches = if *cfg_parallel { "2 branches of guidance x " } else { "" };
        write!(f, "{branches}ring {ring} x ulysses {ulysses}{parts}, {threads} threads each")
    }
}
